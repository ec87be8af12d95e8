"""Requests and how they sample: what Python callers give is checked as what stands in a file is."""

from __future__ import annotations

import math
import re
import unittest
from dataclasses import replace
from typing import Any

from starter.base.model_config import ModelConfig
from starter.errors import CapacityError, RequestError, SchemaError
from starter.schema import MAX_SAMPLES, REQUEST_SHAPE, Request, SamplingParams, TokenEvent

MODEL = ModelConfig(vocab_size=5, width=8, layers=1, heads=4, kv_heads=2, ffn_width=6, max_context=9)


class RequestsTest(unittest.TestCase):
    def test_requests(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "request_id": ("", 3, None),
            "prompt_tokens": ((), "abc", b"abc", 3, (1, True), (1, -1), (1.0,), ("1",), (None,)),
            "max_tokens": (-1, 1.0, True, "5", None),
            "arrival": (-1.0, math.nan, "0", True),
            "priority": (0.5, False),
            "stop_tokens": ((-1,), (True,)),
            "sampling": (None, {}),
            "cache_salt": ("", 3, "half a pair \ud800"),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises(RequestError):
                    Request(**{"request_id": "r", "prompt_tokens": (1,), "max_tokens": 1, name: value})
        request = Request("r", [1, 2], 0, stop_tokens=[3])
        self.assertEqual((request.prompt_tokens, request.stop_tokens), ((1, 2), (3,)))
        self.assertEqual(hash(request), hash(Request("r", (1, 2), 0, stop_tokens=(3,))))

    def test_records_show_what_differs_from_the_default(self) -> None:
        self.assertEqual(repr(SamplingParams(top_k=3)), "SamplingParams(top_k=3)")
        event = TokenEvent("r", 0, 5, "x", 1, 2.0, finish_reason="stop", sample=1)
        self.assertEqual(repr(event), "TokenEvent(request_id='r', index=0, token=5, text='x', step=1, time=2.0, "
                                      "finish_reason='stop', sample=1)")
        self.assertEqual(event.sequence_id, "r#1")

    def test_a_request_against_a_model(self) -> None:
        model = MODEL
        Request("r", (4,) * 9, 0).check_against(model)
        Request("r", (4,), 8).check_against(model)
        for prompt, max_tokens, error in (((5,), 1, RequestError), ((4,) * 10, 0, CapacityError),
                                          ((4,), 9, CapacityError), ((4,), 10**18, CapacityError)):
            with self.subTest(prompt=prompt, max_tokens=max_tokens), self.assertRaises(RequestError) as caught:
                Request("r", prompt, max_tokens).check_against(model)
            self.assertIs(type(caught.exception), error)

    def test_sampling(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "temperature": (-0.1, math.nan, math.inf, True), "top_k": (-1, 1.0, True), "top_p": (-0.1, 1.1, "1"),
            "min_p": (2, None), "seed": (-1, 0.0, False),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises(RequestError):
                    SamplingParams(**{name: value})
        SamplingParams(n=MAX_SAMPLES)
        for call, sentence in (
                (lambda: SamplingParams(temperature=-1), "temperature must be a number from 0 to 1e+06, not -1"),
                (lambda: SamplingParams(top_k=-1), "top_k must be an integer from 0, not -1"),
                (lambda: SamplingParams(n=65), "n must be an integer from 1 to 64, not 65"),
                (lambda: SamplingParams(logit_bias={-1: 0}), "a logit_bias token must be an integer from 0, not -1"),
                (lambda: Request("r", [1, True], 1), "a prompt token must be an integer from 0, not True"),
                (lambda: Request("r", [1], -1), "max_tokens must be an integer from 0, not -1"),
                (lambda: Request("r", [1], 1, priority=0.5), "priority must be an integer, not 0.5"),  # type: ignore
                (lambda: Request("r", [1], 1, stop_tokens=3), "stop_tokens must be a sequence of token")):  # type: ignore
            with self.subTest(sentence), self.assertRaisesRegex(RequestError, re.escape(sentence)):
                call()

    def test_code_may_go_beyond_the_limits_of_a_file(self) -> None:
        """A clock that counts seconds since 1970, an id of a framework's own, a priority that is a time."""
        for changes in ({"arrival": 1.7e9}, {"request_id": "x" * 201}, {"priority": -1_700_000_000},
                        {"max_tokens": 2**40}, {"sampling": SamplingParams(seed=2**64 - 1)}):
            request = replace(Request("r", (1,), 1), **changes)
            with self.subTest(changes), self.assertRaises(SchemaError):
                REQUEST_SHAPE.parse(REQUEST_SHAPE.dump(request), "")


if __name__ == "__main__":
    unittest.main()
