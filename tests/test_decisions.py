"""Decisions and their reasons: a mapping of sentences that are put together when they are read."""

from __future__ import annotations

import unittest

from starter.decisions import Reasons, ScheduledChunk, ScheduleDecision, counted


class Unread:
    """A value that must not be formatted before somebody reads the sentence."""

    def __init__(self) -> None:
        self.reads = 0

    def __str__(self) -> str:
        self.reads += 1
        return "it"


class DecisionsTest(unittest.TestCase):
    def test_reasons_are_a_mapping_of_sentences(self) -> None:
        reasons, value = Reasons(), Unread()
        reasons.say("a", "waits")
        reasons.say("b", "waits: {} needs {}", value, 3)
        reasons.say("a", "{}", "braces {} in a value stay")
        self.assertEqual((value.reads, list(reasons), len(reasons), "b" in reasons, "c" in reasons),
                         (0, ["a", "b"], 2, True, False))
        self.assertEqual(dict(reasons), {"a": "braces {} in a value stay", "b": "waits: it needs 3"})
        self.assertRaises(KeyError, reasons.__getitem__, "c")

    def test_scheduled_tokens(self) -> None:
        chunks = (ScheduledChunk("a", 0, 5, "prefill"), ScheduledChunk("b", 9, 1, "decode"))
        self.assertEqual(ScheduleDecision(0, 8, chunks, (), (), (), (), (), {}).scheduled_tokens, 6)
        self.assertEqual(ScheduleDecision(0, 8, (), (), (), (), (), (), {}).scheduled_tokens, 0)

    def test_counted(self) -> None:
        self.assertEqual([counted(n, "page") for n in (0, 1, 2)], ["0 pages", "1 page", "2 pages"])


if __name__ == "__main__":
    unittest.main()
