"""Reports: the blank template is seen to be blank, true timelines and figures pass, forged ones are named."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from scripts import report
from scripts.grading.check_papers import ENOUGH, SECTIONS, design, figures, sections, timelines
from tests.paths import ROOT, TIMELINE

WORDS = "word " * ENOUGH


class Papers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()

    def design(self, text):
        (self.place / "DESIGN.md").write_text(text, encoding="utf-8")
        return design(self.place, ROOT)

    def test_blank_or_missing(self):
        self.assertEqual(design(self.place, ROOT)["missing"], list(SECTIONS))
        self.assertEqual(design(self.place, ROOT)["problem"], "there is no DESIGN.md")
        template = (ROOT / "docs" / "DESIGN.template.md").read_text(encoding="utf-8")
        for text in (template, "\n\n...\n\n".join(f"## {name}" for name in SECTIONS)):
            found = self.design(text)
            self.assertEqual((found["problem"], found["missing"], found["empty"]),
                             ("it is the blank template", [], list(SECTIONS)))

    def test_what_is_told_is_bounded(self):
        found = self.design("\n".join(f"# {i} {'long' * 500}\n{WORDS}" for i in range(500)))
        self.assertLessEqual(len(json.dumps(found)), 150_000)
        (self.place / "bad.jsonl").write_text("x" * 100_000 + "\n", encoding="utf-8")
        self.assertLess(len(json.dumps(timelines(self.place))), 1_000)

    def test_filled_in(self):
        found = self.design("\n".join(f"## {name}\n\n{WORDS}\n" for name in SECTIONS))
        self.assertEqual((found["problem"], found["missing"], found["empty"]), ("", [], []))
        self.assertEqual(self.design((ROOT / "DESIGN.md").read_text(encoding="utf-8"))["missing"], [])
        found = self.design(f"## Layout\n\n### Files\n\n{WORDS}\n## Choices\n\nNone.\n")
        self.assertEqual(found["missing"], ["Lifecycles", "Sources", "Measurements", "Failure cases"])
        self.assertEqual(found["empty"], ["Choices"])

    def test_words(self):
        self.assertEqual(sections("# A\n<!-- one\n two -->\none ... 两个 x_1\n```\n# no heading\n```\n## B\n\nb\n"),
                         {"A": 7, "B": 1})

    def timeline(self, change=lambda events: None):
        events = [json.loads(line) for line in TIMELINE.read_text(encoding="utf-8").splitlines()]
        change(events)
        (self.place / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
        return timelines(self.place)["run.jsonl"]

    def test_a_true_timeline(self):
        found = self.timeline()
        self.assertEqual((found["violations"], found["wrong"]), (0, []))
        self.assertGreater(found["events"], 100)

    def test_forged_timelines(self):
        def double_the_speed(events):
            steps = [event for event in events if event["event"] == "step"]
            steps[3]["used_pages"] -= 1

        def other_tokens(events):
            for event in events:
                if event["event"] == "token" and event["request"] == "single":
                    event["token"] = (event["token"] + 1) % events[0]["model"]["vocab_size"]

        for change, says in ((double_the_speed, "used pages"), (other_tokens, "its model says"),
                             (lambda events: events.pop(0), "cannot be read"),
                             (lambda events: events[0].update(model=3), "cannot be read")):
            with self.subTest(says=says):
                self.assertIn(says, " ".join(self.timeline(change)["wrong"]))

    def test_figures(self):
        self.assertEqual(figures(self.place), {})
        shutil.copyfile(TIMELINE, self.place / "run.jsonl")
        target = self.place / "REPORT.md"
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            report.main([str(self.place / "run.jsonl"), "-o", str(target)])
        found = figures(self.place)["REPORT.md"]
        self.assertEqual(found["wrong"], "")
        self.assertGreater(found["links"], 50)
        text = target.read_text(encoding="utf-8")
        at = text.index('"TTFT, median"')
        start = text.rindex("[", 0, at)
        target.write_text(text[:start] + "[0.5 steps" + text[text.index("]", start):], encoding="utf-8")
        self.assertIn("TTFT, median", figures(self.place)["REPORT.md"]["wrong"])
        (self.place / "run.jsonl").unlink()
        self.assertTrue(figures(self.place)["REPORT.md"]["wrong"])


if __name__ == "__main__":
    unittest.main()
