"""Which ids are taken, what is found, and when a request is forgotten."""

from __future__ import annotations

import unittest
from dataclasses import replace

from starter.engine import RequestTable
from starter.errors import DuplicateRequestError, RequestError, UnknownRequestError
from starter.schema import Request, SamplingParams
from tests.support import CONFIG, TOKENIZER


class RequestTableTest(unittest.TestCase):
    def setUp(self) -> None:
        self.table = RequestTable(CONFIG, TOKENIZER, seed=5)

    def add(self, request_id: str, n: int = 1) -> None:
        request = Request(request_id, (1, 2), 3, sampling=SamplingParams(n=n))
        self.table.check(request)
        self.table.add(self.table.make_stream(request))

    def end(self, request_id: str, reason: str) -> None:
        """As the engine does: samples are forgotten at once, the stream when it was read."""
        stream = self.table.find(request_id)
        for sample in stream.samples:
            sample.end(reason, None, 0, 0.0)
            del self.table.samples[sample.id]

    def test_an_id_is_taken_until_its_last_event_was_read(self) -> None:
        self.add("a")
        self.assertRaisesRegex(DuplicateRequestError, "'a' is live", self.add, "a")
        self.end("a", "length")
        self.assertRaisesRegex(DuplicateRequestError, "not read to its end", self.add, "a")
        self.assertEqual(self.table.take(self.table.find("a")).finish_reason, "length")
        self.assertRaises(UnknownRequestError, self.table.find, "a")
        self.add("a")

    def test_after_a_cancel_it_is_free_and_the_old_reader_takes_nothing_from_the_new_request(self) -> None:
        self.add("a")
        old = self.table.find("a")
        self.end("a", "cancelled")
        self.add("a")
        self.table.take(old)
        self.assertIsNot(self.table.find("a"), old)

    def test_samples_are_sequences_with_ids_of_their_own(self) -> None:
        self.add("a", n=3)
        self.assertEqual(len(self.table.samples), 3)
        for sequence_id in self.table.samples:
            self.assertRaises(DuplicateRequestError, self.add, sequence_id)

    def test_tokens_that_end_a_request(self) -> None:
        table = RequestTable(replace(CONFIG, eos_tokens=(1, 2)), TOKENIZER, seed=5)
        for ignore_eos, stop_tokens, ends in ((False, (), (1, 2)), (False, (3,), (1, 2, 3)), (True, (), ()),
                                              (True, (1,), (1,))):
            request = Request("a", (1,), 3, sampling=SamplingParams(ignore_eos=ignore_eos), stop_tokens=stop_tokens)
            self.assertEqual(table.make_stream(request).end_tokens, ends)

    def test_fresh_ids_are_free(self) -> None:
        self.add("request-0")
        for _ in range(3):
            request_id = self.table.fresh_id()
            self.assertNotIn(request_id, self.table.streams)
            self.add(request_id)

    def test_what_the_model_cannot_serve(self) -> None:
        too_long = Request("a", (1,) * CONFIG.max_context, 9)
        self.assertRaises(RequestError, self.table.check, too_long)
        self.assertRaises(UnknownRequestError, self.table.find, 5)


if __name__ == "__main__":
    unittest.main()
