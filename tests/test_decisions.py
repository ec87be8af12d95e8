"""Decisions: what they count, and that their reasons are plain."""

from __future__ import annotations

import json
import unittest

from starter.scheduler import ContinuousBatchScheduler, ScheduledChunk, ScheduleDecision, counted
from starter.schema import Request


class DecisionsTest(unittest.TestCase):
    def test_scheduled_tokens(self) -> None:
        decision = ScheduleDecision(0, 8, (), (), (), (), (), (), {}, {}, 0)
        self.assertEqual(decision.scheduled_tokens, 0)
        chunks = (ScheduledChunk("a", 0, 5, "prefill"), ScheduledChunk("b", 9, 1, "decode"))
        self.assertEqual(decision._replace(chunks=chunks).scheduled_tokens, 6)

    def test_reasons_do_not_change_after_the_step(self) -> None:
        scheduler = ContinuousBatchScheduler()
        for name, prompt in (("a", 2), ("b", 5), ("c", 3)):
            scheduler.submit(Request(name, (1,) * prompt, 4))
        decisions = [scheduler.step(6) for _ in range(6)]  # looked at afterwards
        sentences = [decision.reasons.get("a") for decision in decisions]
        self.assertEqual(sentences[1:4], [f"decodes position {i + 1}: token {i + 1} of at most 4" for i in (1, 2, 3)])
        for decision in decisions:
            self.assertEqual(json.loads(json.dumps(decision.reasons)), decision.reasons)
            self.assertLessEqual({chunk.request_id for chunk in decision.chunks}, set(decision.reasons))

    def test_counted(self) -> None:
        self.assertEqual([counted(n, "page") for n in (0, 1, 2)], ["0 pages", "1 page", "2 pages"])


if __name__ == "__main__":
    unittest.main()
