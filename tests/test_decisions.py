"""Decisions: what they count."""

from __future__ import annotations

import json
import unittest

from starter.scheduler import Chunks, ContinuousBatchScheduler, ScheduledChunk, ScheduleDecision, counted
from starter.schema import Request


class DecisionsTest(unittest.TestCase):
    def test_scheduled_tokens(self) -> None:
        chunks = Chunks()
        decision = ScheduleDecision(0, 8, chunks, (), (), (), (), (), {}, {})
        self.assertEqual((decision.scheduled_tokens, len(chunks), decision.chunks), (0, 0, ()))
        chunks.add(("a",), (0,), 5, "prefill")
        chunks.add(("b", "c"), (9, 4), 1, "decode")
        self.assertEqual((decision.scheduled_tokens, len(chunks)), (7, 3))
        self.assertEqual(decision.chunks, (ScheduledChunk("a", 0, 5, "prefill"), ScheduledChunk("b", 9, 1, "decode"),
                                           ScheduledChunk("c", 4, 1, "decode")))

    def test_reasons_of_decodes_are_those_that_a_scheduler_would_have_written(self) -> None:
        scheduler = ContinuousBatchScheduler()
        for name, prompt in (("a", 2), ("b", 5), ("c", 3)):
            scheduler.submit(Request(name, (1,) * prompt, 4))
        decisions = [scheduler.step(6) for _ in range(6)]  # looked at afterwards: they do not change any more
        told = [decision.reasons.get("a") for decision in decisions]
        self.assertEqual(told[1:4], [f"decodes position {i + 1}: token {i + 1} of at most 4" for i in (1, 2, 3)])
        for decision in decisions:
            reasons, why = decision.reasons, decision.why
            self.assertEqual(json.loads(json.dumps(reasons)), reasons)
            self.assertEqual((len(why), dict(why), repr(why)), (len(reasons), reasons, repr(reasons)))
            self.assertLessEqual({chunk.request_id for chunk in decision.chunks}, set(reasons))
            self.assertNotIn("z", why)
            self.assertRaises(KeyError, why.__getitem__, "z")

    def test_counted(self) -> None:
        self.assertEqual([counted(n, "page") for n in (0, 1, 2)], ["0 pages", "1 page", "2 pages"])


if __name__ == "__main__":
    unittest.main()
