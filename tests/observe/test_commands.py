"""``python3 -m starter``: what each command prints and returns, on good timelines, on bad ones, on damaged files."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

from starter import __main__ as program
from starter import driver
from starter.base.weights import seeded_weights
from starter.checkpoints.llama2c import UNSAID, write_llama2c
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.metrics import Metrics
from starter.observe import commands
from starter.observe.perfetto import chrome_trace
from starter.observe.prometheus import to_prometheus
from starter.observe.timeline_file import read_timeline
from starter.schema import (
    CharacterVocabulary,
    EngineSettings,
    ModelConfig,
    Request,
    SamplingParams,
    Scenario,
    ScenarioEvent,
    SeededWeights,
)
from starter.timeline import VirtualClock
from tests.paths import ROOT, TIMELINE
from tests.support import CONFIG, Run, run_main

SMALL = Scenario(
    1, "small", CONFIG, SeededWeights(71), CharacterVocabulary("abcdefghijklmnopq世é€"),
    (Request("a", (3, 1, 4), 4), Request("b", (3, 1, 4, 1), 3, arrival=1.0, sampling=SamplingParams(0.9, n=2)),
     Request("c", (2, 7), 9)), events=(ScenarioEvent(2, "c"),),
    engine=EngineSettings(page_size=2, num_pages=8, budget_tokens=5, prefix_sharing=True))


def run(*arguments: object) -> Run:
    """The program in this process."""
    return run_main(program.main, *arguments)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.file = self.folder / "run.jsonl"
        with InferenceEngine.from_scenario(SMALL, clock=VirtualClock()) as engine:
            list(play(engine, SMALL))
            engine.timeline.write(self.file)

    def rewrite(self, old: str, new: str) -> None:
        text = self.file.read_text(encoding="utf-8")
        self.assertIn(old, text)
        self.file.write_text(text.replace(old, new, 1), encoding="utf-8", newline="\n")

    def drive(self, *arguments: object) -> Run:
        """Let the driver write the timeline."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(driver.main([*map(str, arguments), "--timeline", str(self.file), "--quiet"]), 0)
        return run("replay", self.file)


class ReplayTest(Case):
    def test_the_same(self) -> None:
        number = len(read_timeline(self.file))
        self.assertEqual(run("replay", self.file), Run(0, f"All {number} events are the same.\n", ""))

    def test_not_the_same(self) -> None:
        self.rewrite('"index":1,"token":', '"index":1,"token":1')
        result = run("replay", self.file)
        self.assertEqual((result.code, result.err), (1, ""))
        lines = result.out.splitlines()
        where = next(number for number, event in enumerate(read_timeline(self.file), 1)
                     if event["event"] == "token" and event["index"] == 1)
        self.assertEqual(lines[0], f"The replay differs after {where - 1} equal events.")
        self.assertIn(f"line {where}, step ", lines[1])
        self.assertIn("token events differ in token", lines[1])
        self.assertTrue(lines[2].startswith("  timeline: {") and lines[3].startswith("  replay  : {"), lines)

    def test_the_drivers_timelines_on_either_clock(self) -> None:
        scenario = self.folder / "scenario.json"
        scenario.write_text(SMALL.to_json(), encoding="utf-8")
        self.assertIn("are the same, times aside: they are those of a real", self.drive("--fixture", scenario).out)
        for options in (["--clock", "virtual", "--page-size", 4], ["--quantization", "int4", "--no-cache"],
                        ["--preemption", "swap", "--num-pages", 6, "--policy", "shortest", "--seed", 9]):
            self.assertEqual(self.drive("--fixture", scenario, *options).code, 0)

    def test_a_checkpoints_timeline_wants_its_checkpoint(self) -> None:
        pieces = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), " ", *"ab")
        model = ModelConfig(vocab_size=len(pieces), width=8, layers=1, heads=2, kv_heads=1, ffn_width=6, max_context=32,
                            **UNSAID)
        write_llama2c(self.folder / "model.bin", model, seeded_weights(model, 3))
        (self.folder / "tokenizer.bin").write_bytes(struct.pack("<i", 6) + b"".join(
            struct.pack("<fi", 0.0, len(piece)) + piece.encode() for piece in pieces))
        result = self.drive("--checkpoint", self.folder, "--prompt", "ab", "--max-tokens", 5)
        self.assertEqual(result.code, 2)
        self.assertIn("made with the checkpoint model.bin: say where it is with --checkpoint PATH", result.err)
        self.assertEqual(run("replay", self.file, "--checkpoint", self.folder).code, 0)
        write_llama2c(self.folder / "model.bin", model, seeded_weights(model, 4))
        other = run("replay", self.file, "--checkpoint", self.folder)
        self.assertEqual(other.code, 1)
        self.assertIn("header events differ in weights_sha256", other.out)

    def test_a_device_is_for_the_backend_that_has_one(self) -> None:
        result = run("replay", self.file, "--device", "cpu")
        self.assertEqual((result.code, result.out), (2, ""))
        self.assertIn("device can be chosen for backend 'cuda' only, not for ", result.err)

    def test_a_timeline_that_breaks_off_within_a_step(self) -> None:
        lines = self.file.read_bytes().splitlines(keepends=True)
        self.file.write_bytes(b"".join(lines[:-1]))
        result = run("replay", self.file)
        self.assertEqual(result.code, 0)
        self.assertIn("breaks off within a step, which brings 1 more", result.out)


class CheckTest(Case):
    def test_the_fixture_keeps_all_promises(self) -> None:
        result = run("check", TIMELINE)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertEqual([line[:4] for line in result.out.splitlines()], ["V1  ", "V2  ", "V3  ", "V4  "])
        tokens = sum(event["event"] == "token" for event in read_timeline(TIMELINE))
        self.assertIn(f"{tokens} tokens, each from all that was known", result.out)

    def test_a_broken_promise(self) -> None:
        self.rewrite('"reason":"cancelled"', '"reason":"stop"')
        result = run("check", self.file)
        self.assertEqual((result.code, result.err), (1, ""))
        self.assertRegex(result.out, r"^line \d+, step 2: V3: c ends as 'stop', and was cancelled\n"
                                     r"1 promise is broken\n$")

    def test_of_many_the_first_are_shown(self) -> None:
        self.rewrite('"change":"allocate"', '"change":"evict"')
        lines = run("check", self.file).out.splitlines()
        self.assertEqual(len(lines), commands.SHOWN + 1)
        self.assertRegex(lines[-1], r"^\d\d+ promises are broken; these are the first 20$")


class OutputTest(Case):
    def test_metrics(self) -> None:
        metrics = Metrics.of(read_timeline(self.file))
        self.assertEqual(run("metrics", self.file), Run(0, metrics.to_json() + "\n", ""))
        self.assertEqual(run("metrics", self.file, "--prometheus"), Run(0, to_prometheus(metrics), ""))

    def test_trace(self) -> None:
        path = self.folder / "trace.json"
        self.assertEqual(run("trace", self.file, "-o", path),
                         Run(0, f"{path}: open it in ui.perfetto.dev or chrome://tracing\n", ""))
        document = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual(document["traceEvents"], chrome_trace(read_timeline(self.file)))

    def test_report(self) -> None:
        with patch.object(commands, "write_report") as write:  # what is in it is tested in test_report.py
            self.assertEqual(run("report", self.file, "-o", "x.html"), Run(0, "x.html: open it in a browser\n", ""))
        write.assert_called_once_with(read_timeline(self.file), "x.html")

    def test_as_a_module_from_anywhere(self) -> None:
        result = subprocess.run([sys.executable, "-m", "starter", "check", str(self.file)], cwd=ROOT,
                                capture_output=True, text=True, encoding="utf-8", timeout=60)
        self.assertEqual((result.returncode, result.stdout[:2], result.stderr), (0, "V1", ""))

    def test_wrong_use(self) -> None:
        for arguments in (("frobnicate",), ("check",), ("check", self.file, "--prometheus"),
                          ("replay", self.file, "--check", "x")):
            with self.subTest(arguments=arguments):
                result = run(*arguments)
                self.assertEqual((result.code, result.out), (2, ""))
                self.assertIn("usage: python3 -m starter", result.err)
        for command in ("replay", "check", "metrics", "trace", "report"):
            result = run(command, self.folder / "none.jsonl")
            self.assertEqual((result.code, result.out, result.err.count("\n")), (2, "", 1))
            self.assertIn("cannot read the timeline", result.err)


class DamageTest(Case):
    """Whatever has happened to a file: an answer, never a traceback."""

    def answers(self, *commands: str) -> None:
        for command in commands:
            output = ["-o", str(self.folder / "out")] if command in ("trace", "report") else []
            result = run(command, self.file, *output)
            self.assertIn(result.code, (0, 1, 2))
            self.assertNotIn("Traceback", result.out + result.err)
            if result.code == 2:
                self.assertEqual((result.out, result.err.count("\n"), result.err[:7]), ("", 1, "error: "))

    def test_cut_at_every_byte(self) -> None:
        content = b"".join(self.file.read_bytes().splitlines(keepends=True)[:6])
        body = content.index(b"\n") - 9
        for end in (*range(0, body, 17), *range(body, len(content))):
            self.file.write_bytes(content[:end])
            whole = content[:end].count(b"\n") + (content[end:end + 1] == b"\n")
            try:
                self.assertEqual(len(read_timeline(self.file)), whole)
            except ValueError as error:
                self.assertIn(f"line {whole + 1}:" if end else "not a timeline", str(error))
                self.assertTrue(end == 0 or content[end - 1:end] != b"\n")

    def test_bytes_changed_anywhere(self) -> None:
        content = self.file.read_bytes()
        for seed in range(90):
            dice = random.Random(seed)
            damaged = bytearray(content)
            for _ in range(dice.choice((1, 1, 1, 3))):
                damaged[dice.randrange(len(damaged))] = dice.choice(b'0123456789ab"[]{},:\n\xff- .e')
            self.file.write_bytes(damaged)
            with self.subTest(seed=seed):
                self.answers("check", "metrics", "trace", *(["replay"] if seed % 9 == 0 else []))

    def test_lines_left_out_doubled_or_exchanged(self) -> None:
        lines = self.file.read_bytes().splitlines(keepends=True)
        for seed in range(42):
            dice = random.Random(seed)
            one, other = dice.randrange(1, len(lines)), dice.randrange(1, len(lines))
            changed = list(lines)
            if seed % 3 == 0:
                del changed[one]
            elif seed % 3 == 1:
                changed.insert(other, changed[one])
            else:
                changed[one], changed[other] = changed[other], changed[one]
            self.file.write_bytes(b"".join(changed))
            with self.subTest(seed=seed):
                self.answers("check", "metrics", "trace", *(["replay"] if seed % 7 == 0 else []))


if __name__ == "__main__":
    unittest.main()
