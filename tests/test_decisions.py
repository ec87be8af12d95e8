"""Decisions: what they count."""

from __future__ import annotations

import unittest

from starter.decisions import ScheduledChunk, ScheduleDecision, counted


class DecisionsTest(unittest.TestCase):
    def test_scheduled_tokens(self) -> None:
        chunks = (ScheduledChunk("a", 0, 5, "prefill"), ScheduledChunk("b", 9, 1, "decode"))
        self.assertEqual(ScheduleDecision(0, 8, chunks, (), (), (), (), (), {}).scheduled_tokens, 6)
        self.assertEqual(ScheduleDecision(0, 8, (), (), (), (), (), (), {}).scheduled_tokens, 0)

    def test_counted(self) -> None:
        self.assertEqual([counted(n, "page") for n in (0, 1, 2)], ["0 pages", "1 page", "2 pages"])


if __name__ == "__main__":
    unittest.main()
