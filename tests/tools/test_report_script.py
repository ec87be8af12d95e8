"""scripts/report.py: every number of a report names its file and is what the file says, and --check sees any that is
not. Golden figures are worked out here by hand, or from a timeline's events."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

from scripts import report
from scripts.charts import bars, lines
from scripts.figures import read_source
from starter.errors import SchemaError
from starter.observe.timeline_file import read_timeline
from tests.paths import TIMELINE
from tests.support import make_engine
from tests.timelines import full_engine

BENCH: dict[str, Any] = {
    "suite": "stdlib", "missing": ["transformers"],
    "machine": {"python": "3.11.7", "system": "Linux", "cores": 2, "packages": {"llama2-py": "0.0.6", "numpy": None}},
    "products_ns": [{"rows": 128, "columns": 64, "loop": 55.126, "int8 lanes": 5.0}],
    "shapes": {"260K": {
        "load_seconds": 0.31, "bytes_per_weight": 6.14, "plan": "...",
        "tokens_per_second": {"float, batch 1": [100.0, 1130.0, 120.0], "llama2-py": [10.0, 20.0, 30.0]},
        "overhead": {"float, batch 1": 0.125}}}}
QUANTIZED: dict[str, Any] = {"poems": 40, "samples": 50, "rows": [{
    "name": name, "weight_bytes": 2_391_424 - lost, "weight_share": 1.0 - lost / 1e6, "kv_token_bytes": 3120.0,
    "weight_rms": 0.00531, "weight_max": 0.0368, "layers": {"q": [0.1, 0.2]}, "logit_rms": 0.0156, "loss": 3.95641,
    "loss_change": change, "form": 0.98, "differs_at": at, "tokens_per_second": 301.4, "poem": "白日依山尽"}
    for name, lost, change, at in (("float", 0, 0.0, None), ("int8", 700_000, -0.00012, 7))]}


class ReportCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        shutil.copy(TIMELINE, self.folder / "run.jsonl")
        for name, document in (("bench.json", BENCH), ("quant.json", QUANTIZED)):
            self.put(name, document)
        self.report = self.folder / "REPORT.md"

    def put(self, name: str, document: object) -> None:
        (self.folder / name).write_text(json.dumps(document), encoding="utf-8")

    def run_script(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = report.main([str(argument) for argument in arguments])
        return code, out.getvalue(), err.getvalue()

    def make(self, *names: str) -> str:
        code, _, err = self.run_script(*(self.folder / name for name in names), "-o", self.report)
        self.assertEqual((code, err), (0, ""))
        return self.report.read_text(encoding="utf-8")

    def check(self) -> tuple[int, str]:
        code, out, err = self.run_script("--check", self.report)
        self.assertEqual(err, "")
        return code, out

    def edit(self, old: str, new: str) -> None:
        text = self.report.read_text(encoding="utf-8")
        self.assertIn(old, text)
        self.report.write_text(text.replace(old, new, 1), encoding="utf-8")


class FiguresTest(ReportCase):
    def test_a_timeline_on_the_virtual_clock(self) -> None:
        events, figures = read_timeline(TIMELINE), read_source(TIMELINE).figures
        begun = {event["request"]: event["time"] for event in events if event["event"] == "submit"}
        first = {event["request"]: event["time"] for event in reversed(events) if event["event"] == "token"}
        waits = {request: first[request] - begun[request] for request in first}
        tokens = sum(event["event"] == "token" for event in events)
        steps = [event for event in events if event["event"] == "step"]
        self.assertEqual(figures["TTFT, median"], f"{sorted(waits.values())[(len(waits) - 1) // 2]:.1f} steps")
        self.assertEqual(figures["TTFT, largest"], f"{max(waits.values()):.1f} steps")
        for request, wait in waits.items():
            self.assertEqual(figures[f"{request}: TTFT"], f"{wait:.1f} steps")
        self.assertEqual(figures["none: TTFT"], "-")
        for name, value in (("output tokens", tokens), ("steps", len(steps)), ("requests", len(begun)),
                            ("positions computed", sum(step["computed"] for step in steps)),
                            ("preemptions", sum(len(step["preempted"]) for step in steps)),
                            ("most requests in a step", max(len(step["chunks"]) for step in steps)),
                            ("page size", 8), ("output tokens/s", "-"), ("clock", "virtual, 1 s a step"),
                            ("use cache", "yes"), ("kv budget bytes", "-"),
                            ("sha256", hashlib.sha256(TIMELINE.read_bytes()).hexdigest()[:16])):
            self.assertEqual(figures[name], str(value), name)

    def test_a_timeline_on_a_real_clock_has_milliseconds(self) -> None:
        events = read_timeline(TIMELINE)
        events[0]["step_seconds"] = None
        path = self.folder / "real.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
        seconds, tokens = events[-1]["time"], sum(event["event"] == "token" for event in events)
        figures = read_source(path).figures
        self.assertEqual(figures["output tokens/s"], f"{tokens / seconds:.1f}")
        self.assertRegex(figures["TTFT, median"], r"^\d+000\.0 ms$")
        self.assertEqual(figures["clock"], "real")

    def test_equal_outputs_have_equal_digests(self) -> None:
        outputs = []
        for seed, num_pages in ((1, 9), (1, 64), (2, 64)):
            engine = make_engine(page_size=2, num_pages=num_pages)
            engine.submit([seed, 2, 3], 6, request_id="a")
            engine.submit([5], 6, request_id="b")
            engine.submit([5], 6, request_id="c")
            engine.step()
            engine.cancel("c")
            engine.run()
            engine.timeline.write(self.folder / "run.jsonl")
            outputs.append(read_source(self.folder / "run.jsonl").figures["outputs"])
        self.assertEqual(outputs[0], outputs[1])
        self.assertNotEqual(outputs[1], outputs[2])
        self.assertTrue(all(text.startswith("2, ") for text in outputs))  # c did not end by itself

    def test_a_benchmark(self) -> None:
        figures = read_source(self.folder / "bench.json").figures
        for name, text in (("260K, float, batch 1: tokens/s", "120.0"),
                           ("260K, float, batch 1: middle half", "110.0 to 625.0"),
                           ("260K, float, batch 1: x llama2-py", f"{median((10.0, 56.5, 4.0)):.2f}"),
                           ("260K, float, batch 1: x transformers", "-"),
                           ("260K, float, batch 1: engine's own time", "12.5%"),
                           ("260K, llama2-py: engine's own time", "-"), ("260K: loaded in", "0.3 s"),
                           ("128 x 64: loop", "55.13"), ("packages", "llama2-py 0.0.6"), ("cores", "2")):
            self.assertEqual(figures[name], text, name)

    def test_a_quantization_report(self) -> None:
        figures = read_source(self.folder / "quant.json").figures
        for name, text in (("float: weight bytes", "2,391,424"), ("int8: of float32", "0.300"),
                           ("int8: change of loss", "-0.0001"), ("float: differs at", "-"), ("int8: differs at", "7"),
                           ("int8: keeps the form", "98%"), ("int8: loss", "3.9564")):
            self.assertEqual(figures[name], text, name)

    def test_files_of_another_kind(self) -> None:
        for name, document in (("list.json", [1]), ("empty.json", {}), ("rows.json", {"rows": [{}]}),
                               ("half.json", {**BENCH, "shapes": {"260K": {}}}), ("text.json", "rows")):
            self.put(name, document)
            with self.subTest(name), self.assertRaisesRegex(SchemaError, f"{name} is not what scripts/bench.py"):
                read_source(self.folder / name)
        with self.assertRaisesRegex(SchemaError, "neither a timeline, whose name ends with .jsonl, nor"):
            read_source(self.folder / "notes.txt")


class MakeTest(ReportCase):
    def test_every_number_in_a_table_is_a_link_to_its_file(self) -> None:
        text = self.make("run.jsonl", "bench.json", "quant.json")
        figures = {name: read_source(self.folder / name).figures for name in ("run.jsonl", "bench.json", "quant.json")}
        found = 0
        for line in text.split("\n"):
            if line.startswith("| ") and "---" not in line:
                for cell in line.split(" | ")[1:]:
                    if link := re.fullmatch(r'\[(.*)\]\((\S+) "(.*)"\)( \|)?', cell):
                        self.assertEqual(unescape(link[1]), figures[link[2]][unescape(link[3])])
                        found += 1
        self.assertGreater(found, 80)
        self.assertEqual(self.check(), (0, f"{text.count('](')} numbers and pictures are what their files say\n"))

    def test_pictures_stand_beside_it(self) -> None:
        self.make("run.jsonl", "bench.json", "quant.json")
        pictures = sorted(self.folder.glob("*.svg"))
        self.assertEqual([path.name for path in pictures], [
            f"REPORT.{name}.svg" for name in ("batch", "pages", "quantization", "speed-260K", "work")])
        for path in pictures:
            ElementTree.parse(path)

    def test_what_was_written_around_the_figures_stays(self) -> None:
        self.make("run.jsonl")
        self.edit("# Report\n", "# Ours\n\nWe expected 3 steps.\n")
        self.edit("## What it means\n", "## What it means\n\nMuch.\n")
        text = self.make("run.jsonl", "bench.json")
        self.assertIn("We expected 3 steps.", text)
        self.assertTrue(text.startswith("# Ours") and "Much." in text and text.count("### Sources") == 1)
        self.assertEqual(self.make("run.jsonl", "bench.json"), text)

    def test_a_file_without_the_marks_is_left_alone(self) -> None:
        self.report.write_text("my thesis", encoding="utf-8")
        code, _, err = self.run_script(self.folder / "run.jsonl", "-o", self.report)
        self.assertEqual(code, 2)
        self.assertIn("has not the two marks", err)
        self.assertEqual(self.report.read_text(encoding="utf-8"), "my thesis")

    def test_names_that_markdown_would_take_for_markup(self) -> None:
        engine = make_engine()
        engine.submit([1, 2], 2, request_id='a|b](x.json "y") <i>_*')
        engine.run()
        (self.folder / "of (mine)").mkdir()
        engine.timeline.write(self.folder / "of (mine)" / "a b.jsonl")
        text = self.make("of (mine)/a b.jsonl")
        self.assertIn('(of%20%28mine%29/a%20b.jsonl "steps")', text)
        self.assertEqual(self.check()[0], 0)
        heads = [line.count("|") for line in text.split("\n") if line.startswith("|")]
        self.assertEqual(set(heads), {3})

    def test_every_kind_of_event(self) -> None:
        full_engine().timeline.write(self.folder / "full.jsonl")
        self.make("full.jsonl", "run.jsonl")
        self.assertEqual(self.check()[0], 0)

    def test_two_files_of_one_name(self) -> None:
        (self.folder / "b").mkdir()
        shutil.copy(TIMELINE, self.folder / "b" / "run.jsonl")
        code, _, err = self.run_script(self.folder / "run.jsonl", self.folder / "b" / "run.jsonl", "-o", self.report)
        self.assertEqual((code, err), (2, "error: two of the files have the same name, which tables go by; "
                                          "rename one\n"))

    def test_bad_options(self) -> None:
        for arguments in ((), ("run.jsonl", "--check", "REPORT.md")):
            with self.assertRaises(SystemExit) as ended, redirect_stderr(io.StringIO()) as err:
                report.main(arguments)
            self.assertEqual(ended.exception.code, 2)
            self.assertIn("give the files to report on, or --check and a report", err.getvalue())
        self.assertEqual(self.run_script(self.folder / "none.jsonl")[0], 2)
        self.assertEqual(self.run_script("--check", self.folder / "none.md")[0], 2)


class CheckTest(ReportCase):
    def setUp(self) -> None:
        super().setUp()
        self.make("run.jsonl", "bench.json")

    def wrong(self, sentence: str) -> None:
        code, out = self.check()
        self.assertEqual(code, 1)
        self.assertRegex(out, rf"REPORT\.md, line \d+: {sentence}\n")

    def test_a_number_that_was_changed(self) -> None:
        self.edit('[120.0](bench.json "260K, float, batch 1: tokens/s")',
                  '[170.0](bench.json "260K, float, batch 1: tokens/s")')
        self.wrong(r"'260K, float, batch 1: tokens/s' is 120\.0 in bench\.json, not 170\.0")

    def test_a_file_that_was_changed(self) -> None:
        self.put("bench.json", {**BENCH, "missing": []})
        self.wrong(r"'sha256' is [0-9a-f]{16} in bench\.json, not [0-9a-f]{16}")

    def test_a_figure_that_is_not_there(self) -> None:
        self.edit('"TTFT, median")', '"TTFT, fastest")')
        self.wrong(r"run\.jsonl has no figure 'TTFT, fastest'")

    def test_a_number_in_a_sentence(self) -> None:
        self.edit("## What it means\n", '## What it means\n\nIt took [1](run.jsonl "steps") steps, in 2024.\n')
        self.wrong(r"'steps' is \d+ in run\.jsonl, not 1")

    def test_a_number_in_a_table_without_a_file(self) -> None:
        self.edit("### Sources\n", "| a | int8 |\n| --- | --- |\n| 1 | about 12 |\n\n### Sources\n")
        self.wrong(r"'about 12' names no file that it comes from")

    def test_a_picture_that_was_changed_or_lost(self) -> None:
        path = self.folder / "REPORT.pages.svg"
        path.write_text(path.read_text(encoding="utf-8").replace("214", "213", 1), encoding="utf-8")
        self.wrong(r"the picture REPORT\.pages\.svg is not what run\.jsonl comes to")
        path.unlink()
        self.wrong(r"the picture REPORT\.pages\.svg is not what run\.jsonl comes to")

    def test_other_links_are_nobody_s_business(self) -> None:
        self.edit("## What it means\n", '## What it means\n\n[a](b.md "c") [2](https://a.b/c "d") ![x](x.png "3")\n')
        self.assertEqual(self.check()[0], 0)

    def test_a_file_is_read_once(self) -> None:
        with patch.object(report, "read_source", wraps=read_source) as reads:
            self.check()
        self.assertEqual(reads.call_count, 2)


class ChartsTest(unittest.TestCase):
    def test_bars_are_in_proportion(self) -> None:
        svg = ElementTree.fromstring(bars("t", {"a": 10.0, "<b>": 5.0, "none": 0.0}, {"a": (8.0, 20.0)}))
        widths = [float(rect.get("width", "")) for rect in svg.findall(".//{*}rect")]
        self.assertEqual(widths, [200.0, 100.0, 0.0])  # the whisker of a reaches 400
        self.assertIn("<b>", [text.text for text in svg.findall(".//{*}text")])

    def test_lines_share_a_scale(self) -> None:
        svg = ElementTree.fromstring(lines("t", {"a": [0, 10], "b": [5, 5, 5], "c": []}))
        points = [line.get("points") for line in svg.findall(".//{*}polyline")]
        self.assertEqual(points, ["40.0,214.0 370.0,34.0", "40.0,124.0 370.0,124.0 700.0,124.0", ""])

    def test_nothing_to_draw(self) -> None:
        for svg in (bars("t", {}), lines("t", {}), lines("t", {"a": [0]})):
            ElementTree.fromstring(svg)


if __name__ == "__main__":
    unittest.main()
