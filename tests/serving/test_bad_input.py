"""Whatever a body holds: an error in OpenAI's shape that says where, and a server that goes on."""

from __future__ import annotations

import http.client
import json
import unittest
from typing import ClassVar

from starter.serving.fields import COMPLETION, IGNORED, REFUSED
from tests.serving.support import JSON, SECONDS, ServerCase, eventually, post, read_replies

WRONG = {  # field: values that are refused, each with 400 and this param
    "prompt": (None, "", [], {}, 5, True, [1.5], [True], [None], ["a", 1], [1, "a"], [[1], "a"], [[]], [[1], []], [""],
               "A", "\ud800", [-1], [20], [2**40], [[1], [20]]),
    "max_tokens": (-1, 2**31 - 1, 2**31, 10**18, 1e18, 2.0, True, "5", []),
    "temperature": (-0.1, "1", True, [], 1e7),
    "top_p": (-0.1, 1.1, "1"), "min_p": (2, -1), "top_k": (-2, 1.0, "3", True), "n": (0, -1, 65, 2.0, True, "2"),
    "stop": ("", [""], ["", "x"], 5, [1], ["x"] * 65, {"a": 1}),
    "seed": (-1, 1.5, "x", 2**64), "presence_penalty": (101, "0"), "frequency_penalty": (-101, True),
    "repetition_penalty": (0, -1), "min_tokens": (-1, 1.5), "ignore_eos": (1, "true"),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"1": "a"}, {"1": None}, {"20": 1}, {"99999999999": 1}, {"¹": 1}, [], 5, "a"),
    "logprobs": (-1, 21, 10**6, True, "1", 1.0), "echo": (1, "yes"), "stream": ("true", 1, 0),
    "stop_token_ids": ([-1], [20], [2**40], 5, ["a"]), "stream_options": (5, [], {"x": True}, {"include_usage": 1}),
    "model": (5, ""), "request_id": (5, "", "x" * 101), "priority": ("high", 1.5), "cache_salt": ("", 1),
    "add_special_tokens": (1,)}
NOT_JSON = (b"", b"{", b"{:", b'""', b"[]", b"null", b"5", b"\xff", b'{"prompt": "\xff"}', b"\xef\xbb\xbf{}", b"{}{}",
            b'{"prompt": "a", "prompt": "b"}', b'{"prompt": NaN}', b'{"prompt": "a", "temperature": NaN}',
            b'{"temperature": 1e999, "prompt": "a"}', b"[" * 100_000, b'{"a":' * 100_000,
            b'{"n": ' + b"9" * 5_000 + b"}")


class BodiesTest(ServerCase):
    def test_each_field(self) -> None:
        """On one connection, which each error leaves usable, beside a request that all of them leave alone."""
        expected = self.complete("abc", max_tokens=100, temperature=0)["choices"]
        self.gate.open.clear()
        neighbour = self.engine.submit("abc", 100)
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        for name, values in WRONG.items():
            for value in values:
                with self.subTest(field=name, value=value):
                    client.request("POST", "/v1/completions", json.dumps({"prompt": "abc", name: value}), JSON)
                    answer = client.getresponse()
                    error = json.loads(answer.read())["error"]
                    self.assertEqual(answer.status, 400, error)
                    self.assertNotIn("Traceback", error["message"])
                    self.assertEqual(error["param"], name, error)
                    self.assertTrue(error["message"].startswith(f"/{name}"), error)
        client.close()
        self.assertEqual(self.engine.active, (neighbour,))
        self.gate.open.set()
        self.assertEqual(self.engine.result(neighbour).text, expected[0]["text"])

    def test_what_is_no_object(self) -> None:
        for body in NOT_JSON:
            with self.subTest(body=body[:40]):
                reply = self.ask("POST", "/v1/completions", body)
                self.assertEqual(reply.status, 400)
                self.assertEqual(self.error_of(reply)["type"], "invalid_request_error")
        self.complete()

    def test_where_it_is(self) -> None:
        for body, message in (({"prompt": [[1], [2, -3]]}, "/prompt/1/1: must be from 0"),
                              ({"prompt": "a", "logit_bias": {"3": "x"}}, "/logit_bias/3: "),
                              ({"prompt": ["abc", "aZc"]}, "/prompt/1: the character 'Z' at position 1 "),
                              ({"prompt": "a", "stream": True, "stream_options": {"usage": True}},
                               "/stream_options/usage: unknown key"),
                              ({"prompt": "a", "stream_options": {}}, "/stream_options: goes with stream"),
                              ({"max_tokens": 3}, "/prompt: this key is required and missing"),
                              ({"prompt": "a", "tempreature": 1}, "/tempreature: unknown field; allowed: model, ")):
            with self.subTest(body=body):
                error = self.refused(400, body)
                self.assertTrue(error["message"].startswith(message), error)
                self.assertEqual(error["param"], message.split("/")[1].partition(":")[0])

    def test_fields_of_other_servers(self) -> None:
        """What changes no output is ignored, the rest refused by name, unless its value asks for nothing."""
        plain = self.complete(temperature=0)["choices"]
        for name in IGNORED:
            self.assertEqual(self.complete(temperature=0, **{name: {"any": ["thing"]}})["choices"], plain)
        for name, (neutral, reason) in REFUSED.items():
            for value in (None, *neutral):
                self.assertEqual(self.complete(temperature=0, **{name: value})["choices"], plain)
            error = self.refused(400, {"prompt": "abc", name: "something"})
            self.assertEqual((error["param"], error["message"]), (name, f"/{name}: is not supported: {reason}"))
        self.assertEqual(self.refused(400, {"prompt": "abc", "best_of": True})["param"], "best_of")  # True is not 1
        self.assertFalse(set(COMPLETION.fields) & (set(IGNORED) | set(REFUSED)) or set(IGNORED) & set(REFUSED))

    def test_null_is_absent(self) -> None:
        plain = self.complete(temperature=0, max_tokens=16)["choices"]
        nulls = {name: None for name in COMPLETION.fields if name not in ("prompt", "temperature")}
        self.assertEqual(self.complete(temperature=0, **nulls)["choices"], plain)

    def test_nothing_to_stop_at(self) -> None:
        for stop in (None, []):
            self.assertEqual(self.complete(stop=stop, max_tokens=9)["usage"]["completion_tokens"], 9)

    def test_the_same_id_twice(self) -> None:
        self.gate.open.clear()
        client = self.raw(post({"prompt": "abc", "request_id": "x", "max_tokens": 9}))
        self.assertTrue(eventually(lambda: bool(self.engine.active)))
        error = self.refused(400, {"prompt": "abc", "request_id": "x"})
        self.assertIn("'cmpl-x' is live", error["message"])
        self.gate.open.set()
        self.assertEqual(read_replies(client, 1)[0].document["usage"]["completion_tokens"], 9)
        self.complete(request_id="x")  # it is free again

    def test_all_prompts_or_none(self) -> None:
        """A later prompt that is refused leaves no earlier one behind."""
        for prompts in (["abc", "aZ"], [[1, 2], [20]], [[1], [1] * 128]):
            self.refused(400, {"prompt": prompts, "max_tokens": 1})
            self.assertTrue(self.all_free())
        self.assertEqual(self.engine.metrics().output_tokens, 0)


class QueueTest(ServerCase):
    engine_settings: ClassVar = {"max_running": 1, "max_waiting": 2}

    def test_a_full_queue_is_429(self) -> None:
        self.gate.open.clear()
        running = self.engine.submit("abc", 3)
        self.gate.allowed.release()
        self.assertTrue(eventually(lambda: self.engine.status(running).state == "running"))
        waiting = [self.engine.submit("abc", 3) for _ in range(2)]
        reply = self.ask("POST", "/v1/completions", {"prompt": "abc"})
        self.assertEqual((reply.status, reply.headers["retry-after"]), (429, "1"))
        self.assertEqual(self.error_of(reply)["code"], "rate_limit_exceeded")
        self.engine.cancel(waiting[0])
        self.assertEqual(self.ask("POST", "/v1/completions", {"prompt": ["abc", "abc"]}).status, 429)
        self.assertEqual(len(self.engine.active), 2)  # the first of the two prompts does not stay
        error = self.refused(400, {"prompt": ["a", "b", "c"]})  # which would be refused however often it is sent
        self.assertEqual(error["param"], "prompt")


if __name__ == "__main__":
    unittest.main()
