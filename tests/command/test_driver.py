"""The command line: what it prints and with which code it ends, in this process and as a program of its own."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from starter import driver
from starter.backend import load_backend
from starter.base.weights import seeded_weights
from starter.command import run as run_module
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.metrics import Metrics
from starter.schema import (
    CharacterVocabulary,
    EngineSettings,
    Golden,
    ModelConfig,
    Request,
    SamplingParams,
    Scenario,
    ScenarioEvent,
    SeededWeights,
    parse_scenario,
)
from starter.timeline import VirtualClock
from tests.paths import FIXTURE, ROOT, TIMELINE
from tests.support import CONFIG, FaultyBackend, Run, json_lines, oracle, run_main
from tests.wings import has_wing, needs_wing

if has_wing("observe"):
    from starter.observe.perfetto import chrome_trace
    from starter.observe.report import report_html
    from starter.observe.timeline_file import read_timeline
if has_wing("checkpoints"):
    from starter.checkpoints.llama2c import UNSAID, write_llama2c

BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}  # as it is where nobody says otherwise
REQUESTS = (Request("a", (3, 1, 4), 6), Request("b", (1,), 9, arrival=1.0), Request("gone", (2, 7), 20))
SCENARIO = Scenario(
    1, "small", CONFIG, SeededWeights(71), CharacterVocabulary("abcdefghijklmnopq世é€"), REQUESTS,
    description="three requests, one cancelled", events=(ScenarioEvent(4, "gone"),),
    engine=EngineSettings(page_size=4, num_pages=16, budget_tokens=8),
    golden=Golden({r.request_id: tuple(oracle(r.prompt_tokens, r.max_tokens)) for r in REQUESTS}, smallest_margin=0.0))


def with_golden(request: str, tokens: tuple[int, ...]) -> Scenario:
    """The scenario with other golden tokens for one request."""
    return replace(SCENARIO, golden=replace(SCENARIO.golden, tokens={**SCENARIO.golden.tokens, request: tokens}))


def run(*arguments: object) -> Run:
    """The driver in this process."""
    return run_main(driver.main, *arguments)


def strict_json(text: str) -> Any:
    """JSON text -> value; NaN and Infinity, which are no JSON, are errors."""
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")
    return json.loads(text, parse_constant=refuse)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.file = self.write(SCENARIO)

    def write(self, scenario: Scenario, name: str = "scenario.json") -> Path:
        (self.folder / name).write_text(scenario.to_json(), encoding="utf-8")
        return self.folder / name

    def wrong(self) -> Path:
        """The scenario with another golden token in the middle of b's."""
        right = SCENARIO.golden.tokens["b"]
        return self.write(with_golden("b", (*right[:4], (right[4] + 1) % 20, *right[5:])), "wrong.json")

    def check_refused(self, result: Run, *words: str) -> None:
        """Exit code 2, one line on standard error, no traceback."""
        self.assertEqual((result.code, result.err.count("\n")), (2, 1), result)
        self.assertTrue(result.err.startswith("error: "), result.err)
        for word in words:
            self.assertIn(word, result.err)


class ScenarioTest(Case):
    def test_the_fixture(self) -> None:
        """C4."""
        result = run("--fixture", FIXTURE, "--clock", "virtual")
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertIn("\nAll 10 outputs equal the golden tokens.\n", result.out)

    @needs_wing("backends/lanes")
    def test_the_public_timeline_byte_for_byte(self) -> None:
        """Its header names the backend that computed it."""
        timeline = self.folder / "run.jsonl"
        result = run("--fixture", FIXTURE, "--clock", "virtual", "--timeline", timeline, "--quiet")
        self.assertEqual(result, Run(0, "", ""))
        self.assertEqual(timeline.read_bytes(), TIMELINE.read_bytes())

    def test_equal_to_the_golden_tokens(self) -> None:
        result = run("--fixture", self.file)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertTrue(result.out.startswith("Scenario 'small': three requests, one cancelled\n"))
        self.assertTrue(result.out.endswith("\nAll 3 outputs equal the golden tokens.\n"))

    def test_different_from_the_golden_tokens(self) -> None:
        for further in ([], ["--quantization", "none"]):
            result = run("--fixture", self.wrong(), *further)
            self.assertEqual((result.code, result.err), (1, ""))
            self.assertTrue(result.out.endswith("\nThe output DIFFERS from the golden tokens: b\n"))
            self.assertEqual(result.out.count("differs"), 1)

    def test_an_output_that_is_too_short_or_too_long_differs(self) -> None:
        right = SCENARIO.golden.tokens["b"]
        for golden in ((), right[:-1], (*right, 0)):
            self.assertEqual(run("--fixture", self.write(with_golden("b", golden), "other.json"), "--quiet").code, 1)

    def test_a_cancelled_request_may_stop_early_but_must_agree_so_far(self) -> None:
        first, *rest = SCENARIO.golden.tokens["gone"]
        for golden, code in (((first, *rest[:8]), 0), ((first, *rest[:8], 0, 0, 0), 0), (((first + 1) % 20, *rest), 1),
                             ((), 1)):
            self.assertEqual(run("--fixture", self.write(with_golden("gone", golden), "other.json")).code, code)

    def test_without_golden_tokens(self) -> None:
        result = run("--fixture", self.write(replace(SCENARIO, golden=None), "other.json"))
        self.assertEqual(result.code, 0)
        self.assertTrue(result.out.endswith("\nThis scenario has no golden tokens to compare with.\n"))

    def test_every_way_to_serve_gives_the_golden_tokens(self) -> None:
        for options in (("--page-size", 3, "--budget", 5, "--num-pages", 12), ("--page-size", 1, "--num-pages", 22),
                        ("--max-running", 1), ("--batching", "static"), ("--batching", "none"), ("--no-cache",),
                        ("--seed", 5), ("--policy", "fcfs"), ("--budget", 1, "--max-running", 2), ("--backend", "cpu"),
                        ("--num-pages", 7, "--preemption", "swap", "--host-pages", 9), ("--prefix-sharing",),
                        ("--policy", "shortest"), ("--kv-quantization", "none"), ("--clock", "virtual")):
            with self.subTest(options=options):
                result = run("--fixture", self.file, *options)
                self.assertEqual((result.code, result.err), (0, ""))

    @needs_wing("observe")
    def test_a_trace_and_a_page_that_replays_the_run(self) -> None:
        """Both hold every event, as the timeline file does."""
        trace, page, lines = (self.folder / name for name in ("t.json", "r.html", "t.jsonl"))
        result = run("--fixture", self.file, "--clock", "virtual", "--trace", trace, "--report", page,
                     "--timeline", lines)
        self.assertEqual((result.code, result.err), (0, ""))
        events = read_timeline(lines)
        self.assertEqual(strict_json(trace.read_text(encoding="utf-8"))["traceEvents"], chrome_trace(events))
        self.assertEqual(page.read_text(encoding="utf-8"), report_html(events))
        for option in ("--trace", "--report"):
            with self.subTest(option=option):
                result = run("--fixture", self.file, option, self.folder / "nowhere" / "file")
                self.assertEqual((result.code, len(result.err.splitlines())), (2, 1))

    def test_what_is_written_replaces_nothing_that_is_read_or_written(self) -> None:
        before = self.file.read_bytes()
        for options in (("--report", self.file), ("--trace", self.folder / "x", "--timeline", self.folder / "x")):
            with self.subTest(options=options):
                self.check_refused(run("--fixture", self.file, *options), "is given twice")
        self.assertEqual(self.file.read_bytes(), before)
        self.check_refused(run("--fixture", self.file, "--timeline", ""), "cannot write")
        self.check_refused(run("--fixture", self.file, "--manifest-only", "--trace", self.folder / "x"), "runs nothing")
        self.assertFalse((self.folder / "x").exists())

    def test_quantized_weights_need_not_give_the_golden_tokens_of_the_exact_ones(self) -> None:
        """Unless the scenario itself is quantized: then its golden tokens are of those weights."""
        result = run("--fixture", self.file, "--quantization", "int4")
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertIn("The golden tokens belong to other numbers than these quantized ones", result.out)
        self.assertIn(", int4, ", result.out)
        document = strict_json(self.file.read_text(encoding="utf-8"))
        document["quantization"] = {"bits": 4, "group_size": 32, "symmetric": True}
        self.file.write_text(json.dumps(document), encoding="utf-8")
        self.assertEqual(run("--fixture", self.file).code, 1)

    def test_a_request_that_is_refused_differs_and_says_why(self) -> None:
        result = run("--fixture", self.file, "--num-pages", 3)
        self.assertEqual(result.code, 1)
        self.assertIn(". gone is refused: gone: prompt 2 + max_tokens 20 - 1 = 21 tokens need 6 pages", result.out)
        self.assertIn("DIFFERS from the golden tokens: gone\n", result.out)
        self.assertRegex(result.out, r"\ngone +0 +refused +differs +gone: prompt 2 \+ max_tokens 20 - 1 = 21 tokens")
        document = strict_json(run("--fixture", self.file, "--num-pages", 3, "--json").out)
        self.assertEqual((list(document["refused"]), sorted(document["tokens"])), (["gone"], ["a", "b"]))

    def test_several_samples_have_a_line_each(self) -> None:
        request = Request("r", (3, 1), 4, sampling=SamplingParams(temperature=2.0, n=3))
        scenario = replace(SCENARIO, requests=(request,), events=(), golden=None)
        result = run("--fixture", self.write(scenario, "samples.json"))
        self.assertEqual(result.code, 0)
        with InferenceEngine.from_scenario(scenario) as engine:
            events = [event for played in play(engine, scenario) for event in played.events]
        for number, name in enumerate(("r", "r#1", "r#2")):
            text = "".join(event.text for event in events if event.sample == number)
            self.assertRegex(result.out, rf"\n{name} +4 +length +- +{text!r}\n")


class OutputTest(Case):
    def test_the_table_of_steps(self) -> None:
        """Steps that only decode are joined, up to sixteen; what happens in a step has a line below it."""
        request = Request("r", (3, 1, 4), 20)
        file = self.write(replace(SCENARIO, requests=(request, replace(REQUESTS[0], arrival=1.0)), events=(),
                                  golden=None), "steps.json")
        out = run("--fixture", file, "--budget", 2).out.splitlines()
        table = out[out.index("step    tokens  pages  prefill, then tokens out") + 1:]
        letter = dict(enumerate("abcdefghijklmnopq世é€"))
        r, a = ("".join(letter[token] for token in oracle((3, 1, 4), count)) for count in (20, 6))
        self.assertEqual(table[:8], [
            "0          2/2     1/16  r+2",
            "1          2/2     2/16  r+1 a+1 r" + repr(r[0]),
            "2          2/2     2/16  a+1 r" + repr(r[1]),
            "3          2/2     3/16  a+1 a" + repr(a[0]) + " r" + repr(r[2]),
            "4-7        2/2     5/16   a" + repr(a[1:5]) + " r" + repr(r[3:7]),
            "8          2/2     3/16   a" + repr(a[5]) + " r" + repr(r[7]),
            "          . a ends: it has all its tokens",
            "9-19       1/2     6/16   r" + repr(r[8:19])], "\n".join(table))

    def test_json_is_one_strict_document_and_nothing_else(self) -> None:
        for file, code, verdict in ((self.file, 0, "equal"), (self.wrong(), 1, "differs")):
            timeline = self.folder / "run.jsonl"
            result = run("--fixture", file, "--json", "--timeline", timeline)
            self.assertEqual((result.code, result.err, result.out.count("\n")), (code, "", 1))
            document = strict_json(result.out)
            self.assertEqual((document["scenario"], document["backend"]), ("small", load_backend("cpu").name))
            self.assertEqual(document["golden"], {"a": "equal", "b": verdict, "gone": "equal"})
            self.assertEqual(document["tokens"]["b"], oracle((1,), 9))
            metrics = Metrics.of(json_lines(timeline)).to_dict()  # on a real clock
            self.assertEqual(document["metrics"], json.loads(json.dumps(metrics)))
            self.assertEqual(metrics["output_tokens"], sum(map(len, document["tokens"].values())))

    def test_the_timeline_is_the_engines(self) -> None:
        timeline = self.folder / "run.jsonl"
        options = ("--clock", "virtual", "--timeline", timeline, "--page-size", 2, "--quiet")
        self.assertEqual(run("--fixture", self.file, *options), Run(0, "", ""))
        with InferenceEngine.from_scenario(SCENARIO, clock=VirtualClock(), page_size=2) as engine:
            list(play(engine, SCENARIO))
            engine.timeline.write(self.folder / "other.jsonl")
        self.assertEqual(timeline.read_bytes(), (self.folder / "other.jsonl").read_bytes())

    def test_the_manifest_alone(self) -> None:
        result = run("--fixture", self.file, "--manifest-only", "--page-size", 3, "--quantization", "int8")
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertIn("16 pages of 3 tokens, budget 8 tokens a step", result.out)  # as it would be run
        self.assertIn(", int8, ", result.out)
        self.assertIn("    gone     step 0   2       20   'ch'\n", result.out)
        self.assertNotIn("golden", result.out)
        self.assertEqual(run("--fixture", self.wrong(), "--manifest-only").code, 0)
        as_json = run("--fixture", self.file, "--manifest-only", "--json")
        self.assertEqual(parse_scenario(json.dumps(strict_json(as_json.out))), SCENARIO)

    def test_quiet(self) -> None:
        self.assertEqual(run("--fixture", self.file, "--quiet"), Run(0, "", ""))
        self.assertEqual(run("--fixture", self.wrong(), "--quiet"), Run(1, "", ""))
        self.check_refused(run("--fixture", self.folder / "nothing.json", "--quiet"))

    def test_help(self) -> None:
        result = run("--help")
        self.assertEqual(result.code, 0)
        for option in ("fixture", "backend", "quantization", "kv-quantization", "page-size", "num-pages", "budget",
                       "policy", "seed", "manifest-only", "json", "timeline", "quiet"):
            self.assertIn(f"--{option}", result.out)


class BadInputTest(Case):
    def test_files(self) -> None:
        self.check_refused(run("--fixture", self.folder / "nothing.json"), "nothing.json")
        self.check_refused(run("--fixture", self.folder), str(self.folder))
        document = self.file.read_text(encoding="utf-8")
        for content, word in (("", "not JSON"), ("{", "line 1"), ("[]", "expected an object"), ("[" * 10**5, "nested"),
                              (document.replace('"version": 1', '"version": 2'), "/version"),
                              (document.replace('"max_tokens": 9', '"max_tokens": NaN'), "/requests/1/max_tokens"),
                              (document.replace('"width": 8', '"width": 9'), "/model/width"),
                              (document.replace('"sha256": null', f'"sha256": "{"0" * 64}"'), "/weights/sha256")):
            bad = self.folder / "bad.json"
            bad.write_text(content, encoding="utf-8")
            with self.subTest(content=content[:40]):
                self.check_refused(run("--fixture", bad), word)
        (self.folder / "bad.json").write_bytes(b"\xff\xfe{}")
        self.check_refused(run("--fixture", self.folder / "bad.json"), "UTF-8")

    def test_values_of_options(self) -> None:
        """Before anything is printed."""
        for options, word in ((("--page-size", 0), "error: --page-size: must be from 1 to 65536, not 0"),
                              (("--page-size", -3), "--page-size"), (("--page-size", 10**30), "--page-size"),
                              (("--num-pages", 0), "--num-pages"), (("--num-pages", 2**40), "--num-pages"),
                              (("--budget", 0), "--budget"), (("--max-running", 0), "--max-running"),
                              (("--seed", -1), "--seed"), (("--policy", "lifo"), "--policy"),
                              (("--policy", "lifo"), "'fcfs'"), (("--batching", "dynamic"), "'static'")):
            with self.subTest(options=options):
                result = run("--fixture", self.file, *options)
                self.check_refused(result, word)
                self.assertEqual((result.out, run("--fixture", self.file, "--manifest-only", *options)), ("", result))
        self.check_refused(run("--fixture", self.file, "--backend", "gpu"), "--backend: ", "'gpu'", "'cpu'")
        self.check_refused(run("--fixture", self.file, "--device", "cuda:0"), "--device: ", "'cuda' only")
        self.check_refused(run("--fixture", self.file, "--timeline", self.folder), "cannot write")

    def test_options_that_would_be_ignored(self) -> None:
        self.check_refused(run("--fixture", self.file, "--chat", "x"), "--chat goes with --checkpoint")
        for option, value in (("--max-tokens", 5), ("--temperature", 1), ("--top-k", 3), ("--top-p", 0.5), ("--n", 2),
                              ("--stop", "x")):
            self.check_refused(run("--fixture", self.file, option, value), f"{option} cannot be used here")
        self.check_refused(run("--checkpoint", self.folder, "--manifest-only"), "--manifest-only goes with --fixture")
        prompt = ("--fixture", self.file, "--prompt", SCENARIO.tokenizer.characters[0])
        fixture = ("--fixture", self.file)
        for options, words in (
                ((*fixture, "--host-pages", 5), "--host-pages has no effect without --preemption swap"),
                ((*fixture, "--host-pages", 0, "--preemption", "swap"), "--preemption swap needs pages"),
                ((*fixture, "--no-cache", "--prefix-sharing"), "--prefix-sharing has no effect with --no-"),
                ((*fixture, "--no-cache", "--kv-quantization", "int8"), "--kv-quantization has no effect"),
                ((*fixture, "--no-cache", "--workers", 2), "--workers has no effect with --no-cache"),
                ((*fixture, "--no-cache", "--preemption", "swap"), "--preemption swap has no effect"),
                ((*fixture, "--batching", "none", "--max-running", 4), "--max-running has no effect"),
                ((*fixture, "--quantization", "stored"), "--quantization stored goes with --checkpoint"),
                ((*prompt, "--top-k", 5), "--top-k has no effect on greedy decoding"),
                ((*prompt, "--top-p", 0.5, "--temperature", 0), "--top-p has no effect on greedy decoding"),
                ((*prompt, "--seed", 5), "--seed has no effect on greedy decoding"),
                ((*prompt, "--steps", "all"), "--steps goes with --fixture and no --prompt"),
                ((*prompt, "--manifest-only"), "--manifest-only goes with --fixture and no --prompt"),
                ((*prompt, "--temperature", -1), "--temperature"), ((*prompt, "--n", 0), "--n"),
                ((*fixture, "--timeline", "-"), "--timeline - would write a file of that name"),
                ((*fixture, "--trace", "-"), "--trace -"),
                ((*fixture, "--report", "-"), "--report -")):
            with self.subTest(options=options):
                self.check_refused(run(*options), words)

    def test_num_pages_replaces_a_budget_in_bytes(self) -> None:
        document = strict_json(run("--fixture", self.file, "--manifest-only", "--json").out)
        document["engine"]["kv_budget_bytes"] = 10**6
        other = self.folder / "budget.json"
        other.write_text(json.dumps(document), encoding="utf-8")
        settings = strict_json(run("--fixture", other, "--num-pages", 9, "--manifest-only", "--json").out)["engine"]
        self.assertEqual((settings["num_pages"], settings["kv_budget_bytes"]), (9, None))

    def test_a_fixture_that_is_none_is_named(self) -> None:
        readme = self.folder / "README.md"
        readme.write_text("# A title", encoding="utf-8")
        self.check_refused(run("--fixture", readme), "README.md: ")

    def test_a_requests_id_may_not_be_that_of_anothers_sample(self) -> None:
        document = strict_json(run("--fixture", self.file, "--manifest-only", "--json").out)
        first, second = document["requests"][:2]
        first["sampling"], document["golden"], document["events"] = {"n": 2}, None, []
        second["request_id"] = first["request_id"] + "#1"
        other = self.folder / "meeting.json"
        other.write_text(json.dumps(document), encoding="utf-8")
        self.check_refused(run("--fixture", other), "/requests/1/request_id", "is the id of a sample of")

    def test_what_argparse_refuses(self) -> None:
        for options in ([], ["--fixture"], ["--fixture", "x", "--checkpoint", "y"], ["--fixture", "x", "--frobnicate"],
                        ["--fixture", "x", "--page-size", "4.5"], ["--fixture", "x", "--quantization", "int2"]):
            with self.subTest(options=options):
                result = run(*options)
                self.assertEqual((result.code, result.out), (2, ""))
                self.assertIn("error:", result.err.splitlines()[-1])

    def test_what_the_machine_refuses(self) -> None:
        """No memory for so many pages; a disk that is full; a pipe whose reader has gone."""
        with mock.patch.object(InferenceEngine, "from_scenario", side_effect=MemoryError):
            self.check_refused(run("--fixture", self.file), "memory")
        for error, code in ((OSError(28, "No space left on device"), 2), (BrokenPipeError(32, "Broken pipe"), 0)):
            with mock.patch.object(run_module, "play", side_effect=error):
                result = run("--fixture", self.file, "--quiet")
            self.assertEqual(result.code, code)
            self.assertEqual(result.err, f"error: {error}\n" if code else "")

    @needs_wing("observe")
    def test_an_interrupt_leaves_a_timeline_that_can_be_read(self) -> None:
        def interrupted(engine: InferenceEngine, scenario: Scenario) -> Any:
            yield from [step for step, _ in zip(play(engine, scenario), range(2))]
            raise KeyboardInterrupt

        with mock.patch.object(run_module, "play", interrupted):
            result = run("--fixture", self.file, "--timeline", self.folder / "run.jsonl")
        self.assertEqual((result.code, result.err), (130, "interrupted\n"))
        events = read_timeline(self.folder / "run.jsonl")
        self.assertEqual(events[-1]["event"], "finish")  # what was live when the interrupt came is cancelled on record


class PromptTest(Case):
    """The model of a scenario continues a text."""

    def test_as_the_engine_does(self) -> None:
        text = "".join(SCENARIO.tokenizer.characters[:2])
        with InferenceEngine.from_scenario(SCENARIO) as engine:
            expected = engine.result(engine.submit(text, 5))
        result = run("--fixture", self.file, "--prompt", text, "--max-tokens", 5)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertTrue(result.out.startswith(f"{text}{expected.text}\n\ntime to first token"), result.out)
        [shown] = strict_json(run("--fixture", self.file, "--prompt", text, "--max-tokens", 5, "--json").out)["samples"]
        self.assertEqual((shown["prompt"], shown["text"], shown["tokens"]), (text, expected.text, [*expected.tokens]))

    def test_by_default_as_much_as_fits(self) -> None:
        text = SCENARIO.tokenizer.characters[0] * (SCENARIO.model.max_context - 4)
        [shown] = strict_json(run("--fixture", self.file, "--prompt", text, "--num-pages", 99, "--json").out)["samples"]
        self.assertLessEqual(len(shown["tokens"]), 4)
        self.assertIn(shown["finish_reason"], ("length", "stop"))


class AmountTest(Case):
    """Three hundred requests make a page, not a wall."""

    def setUp(self) -> None:
        super().setUp()
        document = strict_json(run("--fixture", self.file, "--manifest-only", "--json").out)
        document["requests"] = [{**document["requests"][i % 2], "request_id": f"r{i}", "arrival": i // 4}
                                for i in range(300)]
        document["golden"], document["events"] = None, []
        self.many = self.folder / "many.json"
        self.many.write_text(json.dumps(document), encoding="utf-8")

    def test_few_all_and_none(self) -> None:
        lines = {amount: run("--fixture", self.many, "--clock", "virtual", "--steps", amount).out.splitlines()
                 for amount in ("few", "all", "none")}
        self.assertEqual(run("--fixture", self.many, "--clock", "virtual").out.splitlines(), lines["few"])
        self.assertLess(len(lines["few"]), 250)
        self.assertLess(len(lines["none"]), 130)
        self.assertGreater(len(lines["all"]), 900)
        self.assertIn("... and 260 more (--steps all prints them)", lines["few"])
        left = [line for line in lines["few"] if "more lines of steps" in line]
        self.assertEqual(len(left), 1)
        self.assertFalse([line for line in lines["all"] if "--steps all" in line])
        self.assertFalse([line for line in lines["none"] if line.startswith("step ")])


@needs_wing("checkpoints")
class CheckpointTest(Case):
    """A llama2.c model of the smallest kind, whose vocabulary is the bytes and a few letters."""

    PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), " ", *"abcdefgh")

    def setUp(self) -> None:
        super().setUp()
        self.model = ModelConfig(vocab_size=len(self.PIECES), width=8, layers=1, heads=2, kv_heads=1, ffn_width=6,
                                 max_context=64, **UNSAID)
        write_llama2c(self.folder / "model.bin", self.model, seeded_weights(self.model, 3))
        pieces = b"".join(struct.pack("<fi", 0.0, len(piece)) + piece.encode() for piece in self.PIECES)
        (self.folder / "tokenizer.bin").write_bytes(struct.pack("<i", 6) + pieces)

    def texts(self, prompts: list[str], max_tokens: int) -> dict[str, str]:
        """What the engine makes of the prompts."""
        with InferenceEngine.from_checkpoint(self.folder, "cpu") as engine:
            given = [engine.tokenizer.encode(prompt, bos=True) for prompt in prompts]
            tokens = engine.generate(given, max_tokens)
            return {f"prompt-{i}": engine.tokenizer.decode([*before, *after])
                    for i, (before, after) in enumerate(zip(given, tokens), start=1)}

    def test_one_prompt_is_streamed(self) -> None:
        result = run("--checkpoint", self.folder, "--prompt", "abc", "--max-tokens", 12, "--backend", "cpu")
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertTrue(result.out.startswith(self.texts(["abc"], 12)["prompt-1"] + "\n\ntime to first token"))

    def test_several_prompts_are_served_together(self) -> None:
        options = ("--checkpoint", self.folder / "model.bin", "--prompt", "abc", "--prompt", "h", "--max-tokens", 9,
                   "--backend", "cpu")
        wanted = self.texts(["abc", "h"], 9)
        result = run(*options)
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertIn("".join(f"--- {name}\n{text}\n" for name, text in wanted.items()), result.out)
        document = strict_json(run(*options, "--json").out)
        self.assertEqual([shown["prompt"] + shown["text"] for shown in document["samples"]], [*wanted.values()])
        for shown in document["samples"]:
            self.assertEqual((len(shown["tokens"]), len(shown["logprobs"]), shown["sample"]), (9, 9, 0))
            self.assertEqual((shown["finish_reason"], shown["error"]), ("length", None))
        self.assertEqual(document["metrics"]["finished"]["length"] + document["metrics"]["finished"]["stop"], 2)

    def test_samples_and_stop_strings(self) -> None:
        options = ("--checkpoint", self.folder, "--prompt", "abc", "--max-tokens", 9, "--n", 3, "--temperature", 9,
                   "--seed", 5, "--top-k", 200, "--backend", "cpu")
        sampling = SamplingParams(temperature=9.0, top_k=200, n=3)
        with InferenceEngine.from_checkpoint(self.folder, "cpu", seed=5) as engine:
            tokens, wanted = engine.tokenizer.encode("abc", bos=True), ["abc"] * 3
            for event in engine.stream(engine.submit(tokens, 9, request_id="prompt-1", sampling=sampling)):
                wanted[event.sample] += event.text
        names = ["prompt-1", "prompt-1#1", "prompt-1#2"]
        self.assertEqual(len(set(wanted)), 3)
        document = strict_json(run(*options, "--json").out)
        self.assertEqual([(shown["sample"], "abc" + shown["text"]) for shown in document["samples"]],
                         [*enumerate(wanted)])
        self.assertIn("".join(f"--- {name}\n{text}\n" for name, text in zip(names, wanted)), run(*options).out)
        stop = wanted[0][5:7]
        stopped = strict_json(run(*options, "--json", "--stop", stop).out)["samples"][0]
        self.assertEqual((stopped["text"], stopped["finish_reason"]), (wanted[0][3:].partition(stop)[0], "stop"))

    def test_a_prompt_that_does_not_finish(self) -> None:
        """Exit code 1, and why, on standard error; the others are shown."""
        failing = FaultyBackend(spoiled=[self.PIECES.index("h")])
        for further in ((), ("--prompt", "abc")):
            with mock.patch("starter.checkpoints.load.load_backend", return_value=failing):
                result = run("--checkpoint", self.folder, "--prompt", "h", *further, "--max-tokens", 3, "--backend",
                             "cpu")
            self.assertEqual(result.code, 1)
            self.assertRegex(result.err, r"^error: prompt-1 did not finish: BackendError: .*\n$")
            if further:
                self.assertIn(f"--- prompt-2\n{self.texts(['abc'], 3)['prompt-1']}\n", result.out)

    def test_engine_options_and_the_timeline(self) -> None:
        timeline = self.folder / "run.jsonl"
        result = run("--checkpoint", self.folder, "--max-tokens", 5, "--page-size", 2, "--budget", 3, "--quantization",
                     "int8", "--temperature", 0.7, "--top-p", 0.9, "--timeline", timeline, "--quiet",
                     "--backend", "cpu")
        self.assertEqual(result, Run(0, "", ""))
        header, *events = json_lines(timeline)
        self.assertEqual((header["settings"]["page_size"], header["settings"]["budget_tokens"]), (2, 3))
        self.assertEqual((header["quantization"]["bits"], header["backend"]), (8, load_backend("cpu").name))
        self.assertEqual(events[-1]["event"], "finish")

    def test_the_backend_that_was_chosen_is_named_with_the_reason(self) -> None:
        result = run("--checkpoint", self.folder, "--prompt", "abc", "--max-tokens", 2)
        self.assertRegex(result.err, r"\Abackend (numpy: the fastest that is|cpu: NumPy is not) installed.*\n\Z")
        with mock.patch("starter.backend.find_spec", return_value=None):
            result = run("--checkpoint", self.folder, "--prompt", "abc", "--max-tokens", 2)
        self.assertIn("pip install numpy", result.err)
        self.assertEqual(run("--checkpoint", self.folder, "--prompt", "abc", "--max-tokens", 2, "--quiet").err, "")

    def test_what_was_written_is_named(self) -> None:
        path = self.folder / "run.jsonl"
        result = run("--checkpoint", self.folder, "--prompt", "abc", "--max-tokens", 2, "--timeline", path)
        self.assertIn(f"The timeline is in {path}\n", result.out)

    def test_bad_input(self) -> None:
        for path in (self.folder / "nothing", self.file):
            self.check_refused(run("--checkpoint", path))
        self.check_refused(run("--checkpoint", self.folder, "--chat", "hi", "--backend", "cpu"), "no chat template")
        self.check_refused(run("--checkpoint", self.folder, "--chat", "hi", "--prompt", "abc"), "not both")
        for options in (("--max-tokens", -1), ("--max-tokens", 9999), ("--temperature", "nan"), ("--temperature", -1),
                        ("--top-p", 1.5), ("--page-size", 0), ("--backend", "gpu")):
            with self.subTest(options=options):
                self.check_refused(run("--checkpoint", self.folder, "--prompt", "abc", "--backend", "cpu", *options))


class ProgramTest(Case):
    """As a program of its own, from a folder that is not the project's."""

    def start(self, *arguments: object, **further: Any) -> subprocess.CompletedProcess[str]:
        environment = {**BUFFERED, **further.pop("environment", {})}
        return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, cwd=self.folder, check=False,
                              text=True, env=environment, encoding=further.get("encoding", "utf-8"))

    def test_exit_codes_and_any_working_directory(self) -> None:
        program = ROOT / "starter" / "driver.py"
        for arguments, code in ((["--fixture", "scenario.json"], 0), (["--fixture", self.wrong()], 1),
                                (["--fixture", "nothing.json"], 2), (["--frobnicate"], 2)):
            with self.subTest(arguments=arguments):
                result = self.start(program, *arguments)
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertNotIn("Traceback", result.stderr)
                self.assertEqual(bool(result.stderr), code == 2)

    def test_a_console_that_knows_only_ascii(self) -> None:
        """The golden run spells 世, é and €."""
        environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        for further in ((), ("--json",)):
            result = self.start(ROOT / "starter" / "driver.py", "--fixture", "scenario.json", *further,
                                environment=environment, encoding="ascii")
            note = "" if further else ("note: this output is in ascii, which lacks some characters; they are shown as "
                                       "'?'. With PYTHONUTF8=1 all of them are written\n")
            self.assertEqual((result.returncode, result.stderr), (0, note))
        self.assertRegex(run("--fixture", self.file).out, "[世é€]")

    def test_as_a_module(self) -> None:
        result = self.start("-m", "starter.driver", "--fixture", "scenario.json", "--manifest-only", "--json",
                            environment={"PYTHONPATH": str(ROOT)})
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(strict_json(result.stdout), SCENARIO.to_dict())

    @unittest.skipUnless(os.name == "posix", "closed pipes and full disks look like this on POSIX systems")
    def test_standard_output_that_takes_no_more(self) -> None:
        for further in ((), ("--json",)):
            command = [sys.executable, ROOT / "starter" / "driver.py", "--fixture", self.file, *further]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=BUFFERED) as process:
                process.stdout.close()  # as `| head -1` does
                self.assertEqual((process.wait(), process.stderr.read()), (0, ""))
            if Path("/dev/full").exists():
                with open("/dev/full", "w", encoding="utf-8") as full:
                    done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
                                          env=BUFFERED)
                self.check_refused(Run(done.returncode, "", done.stderr), "No space left")


if __name__ == "__main__":
    unittest.main()
