"""What the driver prints of a run."""

from __future__ import annotations

import ast
import io
import re
import unittest

from starter import InferenceEngine, load_scenario
from starter.base.console import Console
from starter.command.play import play
from starter.command.printing import StepPrinter, print_manifest, print_metrics, print_results
from starter.metrics import Metrics
from starter.timeline import VirtualClock
from tests.paths import FIXTURE


class ShowTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.scenario = load_scenario(FIXTURE)
        cls.out = io.StringIO()
        cls.events = []
        with InferenceEngine.from_scenario(cls.scenario, clock=VirtualClock()) as engine:
            printer = StepPrinter(engine, Console(cls.out))
            for played in play(engine, cls.scenario):
                cls.events += played.events
                printer.show(played)
            printer.flush()
            cls.metrics = engine.metrics()
        cls.lines = cls.out.getvalue().splitlines()

    def printed(self, show, *arguments) -> str:
        out = io.StringIO()
        show(*arguments, Console(out))
        return out.getvalue()

    def test_every_token_of_every_request_is_in_the_table_once(self) -> None:
        for request in self.scenario.requests:
            text = "".join(event.text for event in self.events if event.request_id == request.request_id)
            pieces = [word for line in self.lines if line[:1].isdigit() for word in self.words(line)]
            shown = "".join(piece for name, piece in pieces if name == request.request_id)
            self.assertEqual(shown, text, request.request_id)

    def words(self, line: str) -> list[tuple[str, str]]:
        """(request, text) pairs of a line: name'text'."""
        found = re.findall(r"""(\w+)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", line)
        return [(name, ast.literal_eval(text)) for name, text in found]

    def test_every_step_is_in_the_table_once_and_in_order(self) -> None:
        spans = [line.split()[0].split("-") for line in self.lines if line[:1].isdigit()]
        steps = [step for span in spans for step in range(int(span[0]), int(span[-1]) + 1)]
        self.assertEqual(steps, list(range(self.metrics.steps)))

    def test_waits_preemptions_and_endings_are_said_in_words(self) -> None:
        notes = [line for line in self.lines if line.startswith("          . ")]
        for words in ("waits: needs", "is preempted:", "was cancelled", "ends with an end-of-sequence token",
                      "ends: it has all its tokens"):
            self.assertTrue(any(words in note for note in notes), words)

    def test_the_manifest_names_what_will_be_run(self) -> None:
        text = self.printed(print_manifest, self.scenario)
        for words in ("3 layers, width 48, 6 heads over 2 KV heads", "20 pages of 8 tokens", "10, and 1 cancelled",
                      *(request.request_id for request in self.scenario.requests)):
            self.assertIn(words, text)

    def test_results_have_a_line_for_each_request(self) -> None:
        text = self.printed(print_results, self.events, {"huge": "needs 9 pages"}, {"exact": "equal"})
        lines = {line.split()[0]: line for line in text.splitlines() if line}
        self.assertEqual(set(lines), {"request", "huge", *(request.request_id for request in self.scenario.requests)})
        self.assertRegex(lines["huge"], r"huge +0 +refused +- +needs 9 pages")
        self.assertRegex(lines["exact"], r"exact +24 +length +equal")
        self.assertRegex(lines["none"], r"none +0 +length +- +''")

    def test_metrics_without_any_sample(self) -> None:
        text = self.printed(print_metrics, Metrics.of([]), "real")
        self.assertRegex(text, r"time to first token +-\n")
        self.assertRegex(text, r"batch utilization +- of the budget, up to 0 requests")

    def test_metrics_in_steps_or_milliseconds(self) -> None:
        self.assertRegex(self.printed(print_metrics, self.metrics, "virtual"), r"first token +median \d+\.\d steps")
        self.assertRegex(self.printed(print_metrics, self.metrics, "real"), r"first token +median \d+\.\d ms")


if __name__ == "__main__":
    unittest.main()
