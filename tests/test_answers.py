"""What a step's rows become: a choice for each sample that is due, an error that stays with its request."""

from __future__ import annotations

import unittest
from dataclasses import replace
from math import nan

from starter.engine import Answers, RequestTable, Sample
from starter.errors import BackendError
from starter.metrics import MetricsCollector
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import Request, SamplingParams
from starter.timeline import Recorder, VirtualClock
from tests.support import CONFIG, TOKENIZER

END = 7
ROW = [0.0, 5.0, *[-9.0] * (CONFIG.vocab_size - 2)]  # token 1 is the likeliest


class AnswersTest(unittest.TestCase):
    def setUp(self) -> None:
        self.table = RequestTable(replace(CONFIG, eos_tokens=(END,)), TOKENIZER, seed=3)
        self.scheduler = ContinuousBatchScheduler(8)
        self.recorder = Recorder(VirtualClock(), MetricsCollector())
        self.answers = Answers(self.table, self.scheduler, self.recorder)

    def started(self, request_id: str, max_tokens: int = 4, **sampling: object) -> Sample:
        """A request whose prompt a step is computing."""
        request = Request(request_id, (1, 2), max_tokens, sampling=SamplingParams(**sampling))
        stream = self.table.make_stream(request)
        self.scheduler.submit(request)
        self.table.add(stream)
        self.recorder.submitted(request)
        self.scheduler.step(100)
        return stream.samples[0]

    def events(self, kind: str) -> list[str]:
        return [event["request"] for event in self.recorder.timeline if event["event"] == kind]

    def test_a_row_becomes_a_token_of_its_stream(self) -> None:
        sample = self.started("a")
        choices, failures = self.answers.choose({sample: ROW})
        [choice] = choices.values()
        self.answers.settle(choices, failures)
        [event] = sample.stream.unread
        self.assertEqual((choice.token, event.token, event.index, event.finish_reason), (1, 1, 0, None))
        self.assertEqual(self.events("token"), ["a"])

    def test_after_the_prompt_one_choice_for_each_sample(self) -> None:
        sample = self.started("a", n=3, temperature=1.0, seed=1)
        choices, failures = self.answers.choose({sample: ROW})
        self.assertEqual([each.number for each in choices], [0, 1, 2])
        self.answers.settle(choices, failures)
        self.assertEqual(len(self.events("fork")), 2)
        self.assertEqual(list(self.answers.choose({sample: ROW})[0]), [sample])

    def test_choosing_again_chooses_the_same(self) -> None:
        """As after an interrupted step: what was not settled has used up no random number."""
        sample = self.started("a", temperature=1.5, seed=2)
        flat = [0.0] * CONFIG.vocab_size
        self.assertEqual(*(self.answers.choose({sample: flat}) for _ in range(2)))

    def test_an_end_token_ends_the_request(self) -> None:
        sample = self.started("a")
        row = list(ROW)
        row[END] = 9.0
        self.answers.settle(*self.answers.choose({sample: row}))
        self.assertEqual((sample.finish_reason, self.table.samples, self.scheduler.idle), ("stop", {}, True))
        self.assertEqual(self.events("finish"), ["a"])

    def test_what_is_wrong_with_a_row_concerns_its_request_alone(self) -> None:
        bad, good = self.started("bad"), self.started("good")
        choices, failures = self.answers.choose({bad: [nan, *ROW[1:]], good: ROW})
        self.assertEqual((list(choices), list(failures)), ([good], [bad]))
        self.assertIsInstance(failures[bad], BackendError)
        self.answers.settle(choices, failures)
        [event] = bad.stream.unread
        self.assertEqual((event.token, event.finish_reason), (None, "error"))
        self.assertIn("NaN", event.error)
        self.assertEqual([event.token for event in good.stream.unread], [1])
        self.assertEqual(list(self.table.samples), ["good"])

    def test_a_failed_computation_is_passed_on(self) -> None:
        sample, failure = self.started("a"), OSError("no luck")
        outcomes = self.answers.choose({sample: failure})
        self.assertEqual(outcomes, ({}, {sample: failure}))
        self.answers.settle(*outcomes)
        self.assertEqual(sample.stream.events[-1].error, "OSError: no luck")


if __name__ == "__main__":
    unittest.main()
