"""POST /v1/completions: tokens through the server are tokens in process, whole and streamed; usage, echo, logprobs."""

from __future__ import annotations

import unittest
from typing import Any

from starter.schema import SamplingParams
from tests.serving.support import ServerCase

PROMPT = (3, 1, 4)
OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # fields of the body, and of SamplingParams
    ({"temperature": 0}, {}),
    ({}, {"temperature": 1.0}),
    ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_k": 5}),
    ({"top_k": -1}, {"temperature": 1.0}),
    ({"top_k": 1}, {"temperature": 1.0, "top_k": 1}),
    ({"top_k": 20}, {"temperature": 1.0, "top_k": 20}),
    ({"top_k": 2**31}, {"temperature": 1.0, "top_k": 2**31}),
    ({"top_p": 0.6}, {"temperature": 1.0, "top_p": 0.6}),
    ({"min_p": 0.2}, {"temperature": 1.0, "min_p": 0.2}),
    ({"n": 3}, {"temperature": 1.0, "n": 3}),
    ({"logit_bias": {"3": 9.5, "0": -1e6}}, {"temperature": 1.0, "logit_bias": {3: 9.5, 0: -1e6}}),
    ({"repetition_penalty": 1.7}, {"temperature": 1.0, "repetition_penalty": 1.7}),
    ({"presence_penalty": 1.5}, {"temperature": 1.0, "presence_penalty": 1.5}),
    ({"frequency_penalty": -2.0}, {"temperature": 1.0, "frequency_penalty": -2.0}),
    ({"stop": ["qq", "e"]}, {"temperature": 1.0, "stop": ("qq", "e")}),
    ({"stop": "e", "min_tokens": 5}, {"temperature": 1.0, "stop": ("e",), "min_tokens": 5}),
    ({"logprobs": 0}, {"temperature": 1.0, "logprobs": 0}),
    ({"logprobs": 4, "n": 2}, {"temperature": 1.0, "logprobs": 4, "n": 2}))


class TokensTest(ServerCase):
    def test_the_same_as_in_process(self) -> None:
        """For every sampling option, whole and streamed: texts, ends, numbers."""
        for fields, options in OPTIONS:
            with self.subTest(**fields):
                sampling = SamplingParams(**{"seed": 7, **options})
                name = self.engine.submit(PROMPT, 12, sampling=sampling)
                expected = self.engine.result(name)
                whole = self.complete(PROMPT, max_tokens=12, seed=7, **fields)
                chunks = self.stream(PROMPT, max_tokens=12, seed=7, **fields)
                self.assertEqual([choice["index"] for choice in whole["choices"]], list(range(sampling.n)))
                for choice, sample in zip(whole["choices"], expected.samples):
                    self.assertEqual((choice["text"], choice["finish_reason"]), (sample.text, sample.finish_reason))
                    self.check_logprobs(choice["logprobs"], sample, sampling.logprobs)
                for index, choice in enumerate(whole["choices"]):
                    own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
                    self.assertEqual("".join(each["text"] for each in own), choice["text"])
                    self.assertEqual([each["finish_reason"] for each in own if each["finish_reason"]],
                                     [choice["finish_reason"]])
                    self.assertEqual(own[-1]["finish_reason"], choice["finish_reason"])

    def check_logprobs(self, given: Any, sample: Any, asked: int | None) -> None:
        if asked is None:
            self.assertIsNone(given)
            return
        names = [self.engine.tokenizer.decode([token]) for token in sample.tokens]
        self.assertEqual((given["tokens"], given["token_logprobs"]), (names, list(sample.logprobs)))
        offsets = [0]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        self.assertEqual(given["text_offset"], offsets[:-1])
        for name, logprob, likeliest, listed in zip(names, sample.logprobs, given["top_logprobs"],
                                                    sample.top_logprobs or [()] * len(names)):
            top = {self.engine.tokenizer.decode([token]): number for token, number in listed}
            self.assertEqual(likeliest, {**top, name: logprob})

    def test_stop_tokens_and_a_seed_of_its_own(self) -> None:
        name = self.engine.submit(PROMPT, 12)
        tokens = self.engine.result(name).tokens
        stopped = self.complete(PROMPT, max_tokens=12, temperature=0, stop_token_ids=[tokens[4]])
        self.assertEqual(stopped["choices"][0]["finish_reason"], "stop")
        self.assertEqual(stopped["usage"]["completion_tokens"], tokens.index(tokens[4]) + 1)
        texts = {self.complete(PROMPT, max_tokens=12)["choices"][0]["text"] for _ in range(4)}
        self.assertGreater(len(texts), 1)  # without a seed no two requests draw alike

    def test_every_length_ends_alike(self) -> None:
        """The last token is never lost."""
        for length in range(1, 8):
            whole = self.complete(PROMPT, max_tokens=length, temperature=0)
            chunks = self.stream(PROMPT, max_tokens=length, temperature=0, stream_options={"include_usage": True})
            self.assertEqual("".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]),
                             whole["choices"][0]["text"])
            self.assertEqual(chunks[-1]["usage"], whole["usage"])
            self.assertEqual(whole["usage"], {"prompt_tokens": 3, "completion_tokens": length,
                                              "total_tokens": 3 + length})

    def test_several_prompts(self) -> None:
        """Texts or tokens; choice p * n + s is sample s of prompt p."""
        for prompts in (["abc", "f"], [[0, 1, 2], [5]]):
            together = self.complete(prompts, max_tokens=5, temperature=0.9, seed=3, n=2)
            alone = [choice for prompt in prompts for choice in
                     self.complete(prompt, max_tokens=5, temperature=0.9, seed=3, n=2)["choices"]]
            self.assertEqual([choice["text"] for choice in together["choices"]], [each["text"] for each in alone])
            self.assertEqual([choice["index"] for choice in together["choices"]], [0, 1, 2, 3])
            self.assertEqual(together["usage"], {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24})
            chunks = self.stream(prompts, max_tokens=5, temperature=0.9, seed=3, n=2)
            texts = ["", "", "", ""]
            for chunk in chunks:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            self.assertEqual(texts, [each["text"] for each in alone])

    def test_echo(self) -> None:
        for prompt, text in (("abc", "abc"), ([0, 1, 2], "abc")):
            plain = self.complete(prompt, max_tokens=3, temperature=0)["choices"][0]["text"]
            for length in (0, 3):
                fields = {"max_tokens": length, "temperature": 0, "echo": True, "n": 2}
                whole = self.complete(prompt, **fields)
                self.assertEqual([choice["text"] for choice in whole["choices"]], [text + plain[:length]] * 2)
                chunks = [chunk["choices"][0] for chunk in self.stream(prompt, **fields)]
                self.assertEqual("".join(chunk["text"] for chunk in chunks if chunk["index"] == 1),
                                 text + plain[:length])

    def test_the_rest_of_the_context(self) -> None:
        """Without max_tokens: 16 tokens, or as many as fit; never a negative number in a message."""
        for length, tokens in ((1, 16), (112, 16), (113, 15), (127, 1)):
            self.assertEqual(self.complete([1] * length)["usage"]["completion_tokens"], tokens)
        for length in (128, 129, 500):
            error = self.refused(400, {"prompt": [1] * length})
            self.assertEqual(error["code"], "context_length_exceeded")
            self.assertRegex(error["message"], rf"\A/prompt: the prompt has {length} tokens, and the context .* 128")
        error = self.refused(400, {"prompt": [1] * 100, "max_tokens": 29})
        self.assertEqual((error["code"], error["param"]), ("context_length_exceeded", "max_tokens"))


class UsageTest(ServerCase):
    def test_only_as_asked(self) -> None:
        for options, at_end, always in ((None, False, False), ({}, False, False),
                                        ({"include_usage": False}, False, False),
                                        ({"continuous_usage_stats": True}, False, False),
                                        ({"include_usage": True}, True, False),
                                        ({"include_usage": True, "continuous_usage_stats": True}, True, True)):
            with self.subTest(options=options):
                chunks = self.stream(PROMPT, max_tokens=4, n=2, stream_options=options)
                usages = [chunk.get("usage", "absent") for chunk in chunks]
                if not at_end:
                    self.assertEqual(usages, ["absent"] * 8)
                    continue
                self.assertEqual(chunks[-1]["choices"], [])
                self.assertEqual(usages[-1], {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11})
                running = [{"prompt_tokens": 3, "completion_tokens": i, "total_tokens": 3 + i} for i in range(1, 9)]
                self.assertEqual(usages[:-1], running if always else [None] * 8)

    def test_one_id_in_every_chunk(self) -> None:
        chunks = self.stream(PROMPT, n=3, max_tokens=4, request_id="mine")
        self.assertEqual({chunk["id"] for chunk in chunks}, {"cmpl-mine"})
        self.assertEqual({(chunk["object"], chunk["model"]) for chunk in chunks}, {("text_completion", "tiny")})


if __name__ == "__main__":
    unittest.main()
