"""POST /v1/chat/completions: the template's prompt, whole and streamed; and log-probabilities of an echoed prompt."""

from __future__ import annotations

import json
import unittest
from typing import Any

from starter.backend import ReferenceBackend
from starter.base.weights import seeded_weights
from starter.engine import InferenceEngine
from starter.model import Loaded, Model
from starter.schema import EngineSettings, ModelConfig, SamplingParams
from tests.extras import needs
from tests.serving.support import Reply, ServerCase
from tests.wings import has_wing, needs_wing

if has_wing("checkpoints"):
    from starter.checkpoints.chat import chat_prompt
    from tests.checkpoints.test_chat import CHATML, number, ours

USER = {"role": "user", "content": "Hi"}
PROMPT = (3, 1, 4, 1, 5)


@needs_wing("checkpoints")
@needs("checkpoints", "tokenizers", "jinja2")
class ChatTest(ServerCase):
    def setUp(self) -> None:
        super().setUp()
        super().tearDown()
        tokenizer = ours(CHATML)
        config = ModelConfig(vocab_size=tokenizer.vocab_size, width=8, layers=1, heads=2, kv_heads=2, ffn_width=8,
                             max_context=200, bos_token=256, eos_tokens=(257,), tied_output=False)
        model = Model(config, seeded_weights(config, 3), ReferenceBackend())
        self.serve(InferenceEngine(Loaded(model, tokenizer, {}),
                                   EngineSettings(page_size=8, num_pages=60, budget_tokens=64)))

    def chat(self, messages: object = (USER,), **fields: object) -> Reply:
        return self.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8, **fields})

    def test_the_tokens_are_those_of_the_template(self) -> None:
        conversation = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "a<|im_end|>"}, USER]
        for fields in ({"temperature": 0}, {"seed": 3, "n": 2}, {"seed": 1, "logprobs": True},
                       {"seed": 3, "top_k": 5, "logprobs": True, "top_logprobs": 2}):
            with self.subTest(**fields):
                prompt, ends = chat_prompt(self.engine.tokenizer, conversation)
                sampling = SamplingParams(temperature=fields.get("temperature", 1.0), seed=fields.get("seed"),
                                          n=fields.get("n", 1), top_k=fields.get("top_k", 0),
                                          logprobs=fields.get("top_logprobs", 0) if "logprobs" in fields else None)
                expected = self.engine.result(self.engine.submit(prompt, 8, sampling=sampling, stop_tokens=ends))
                whole = self.chat(conversation, **fields).document
                self.assertEqual(whole["object"], "chat.completion")
                self.assertEqual(whole["usage"]["prompt_tokens"], len(prompt))
                self.assertEqual(whole["usage"]["completion_tokens"], sum(len(one.tokens) for one in expected.samples))
                for index, (choice, sample) in enumerate(zip(whole["choices"], expected.samples, strict=True)):
                    self.assertEqual(choice["message"], {"role": "assistant", "content": sample.text, "refusal": None})
                    self.assertEqual((choice["index"], choice["finish_reason"]), (index, sample.finish_reason))
                    self.check_logprobs(choice["logprobs"], sample, fields.get("top_logprobs", 0), "logprobs" in fields)
                self.check_stream(self.chat(conversation, stream=True, **fields).events, whole)

    def check_logprobs(self, given: Any, sample: Any, listed: int, asked: bool) -> None:
        if not asked:
            self.assertIsNone(given)
            return
        self.assertEqual([entry["logprob"] for entry in given["content"]], list(sample.logprobs))
        for entry, token, likeliest in zip(given["content"], sample.tokens, sample.top_logprobs):
            self.assertEqual(bytes(entry["bytes"]), self.engine.tokenizer.bytes_of(token))
            self.assertEqual([top["logprob"] for top in entry["top_logprobs"]],
                             [logprob for _, logprob in likeliest[:listed]])

    def check_stream(self, chunks: list[Any], whole: Any) -> None:
        for index, choice in enumerate(whole["choices"]):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            self.assertEqual([each["delta"].get("role") for each in own], ["assistant"] + [None] * (len(own) - 1))
            self.assertEqual("".join(each["delta"]["content"] for each in own), choice["message"]["content"])
            reasons = [each["finish_reason"] for each in own if each["finish_reason"]]
            self.assertEqual(reasons, [choice["finish_reason"]])
            self.assertEqual(own[-1]["finish_reason"], choice["finish_reason"])
            if choice["logprobs"]:
                self.assertEqual([entry for each in own for entry in each["logprobs"]["content"]],
                                 choice["logprobs"]["content"])
        self.assertEqual({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"})

    def test_the_templates_mark_ends_an_answer(self) -> None:
        reply = self.chat(logit_bias={str(number("<|im_end|>")): 1000})
        choice = reply.document["choices"][0]
        self.assertEqual((choice["message"]["content"], choice["finish_reason"]), ("", "stop"))

    def test_lengths(self) -> None:
        """max_completion_tokens, its former name, or as many as fit."""
        prompt = len(chat_prompt(self.engine.tokenizer, [USER]).tokens)
        for fields, tokens in (({"max_completion_tokens": 5, "max_tokens": None}, 5), ({"max_tokens": 3}, 3),
                               ({"max_tokens": 3, "max_completion_tokens": 3}, 3),
                               ({"max_tokens": None}, 200 - prompt)):
            usage = self.chat(ignore_eos=True, temperature=0, logit_bias={"97": 1000}, **fields).document["usage"]
            self.assertEqual(usage["completion_tokens"], tokens, fields)

    def test_usage_in_streams(self) -> None:
        chunks = self.chat(stream=True, temperature=0, stream_options={"include_usage": True}).events
        self.assertEqual((chunks[-1]["choices"], chunks[0]["usage"]), ([], None))
        self.assertEqual(chunks[-1]["usage"], self.chat(temperature=0).document["usage"])

    def test_parts_of_text(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        answers = [self.chat([{"role": "user", "content": content}], temperature=0).document
                   for content in (parts, "a\nb")]
        self.assertEqual(answers[0]["usage"], answers[1]["usage"])
        self.assertEqual(answers[0]["choices"], answers[1]["choices"])

    def test_an_answer_is_sent_back_as_it_came(self) -> None:
        message = self.chat(temperature=0).document["choices"][0]["message"]
        more = {**message, "tool_calls": None, "function_call": None, "annotations": [], "audio": None}
        self.assertEqual(self.chat([USER, more, USER]).status, 200)

    def test_what_is_refused(self) -> None:
        for fields, param, words in (
            ({"messages": []}, "messages", "/messages: expected a list of messages"),
            ({"messages": [{"role": "pirate", "content": "x"}]}, "messages", "/messages/0/role: allowed: system"),
            ({"messages": [{"role": "user"}]}, "messages", "/messages/0/content: expected a text"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "/messages/0/content/0"),
            ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages", "/messages/0/mood: unknown"),
            ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "has 3.. tokens"),
            ({"tools": [{"type": "function"}]}, "tools", "/tools: is not supported: calls of tools"),
            ({"tool_choice": "required"}, "tool_choice", "not supported"),
            ({"prompt": "x"}, "prompt", "/prompt: unknown field"),
            ({"top_logprobs": 3}, "top_logprobs", "goes with logprobs: true"),
            ({"logprobs": 3}, "logprobs", "/logprobs"), ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
            ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "former name"),
            ({"logit_bias": {"9999": 1}}, "logit_bias", "/logit_bias/9999: token 9999 is outside the vocabulary"),
            ({"response_format": {"type": "json_object"}}, "response_format", "free text"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "no variable"),
        ):
            with self.subTest(**fields):
                reply = self.chat(**fields) if "messages" not in fields else self.chat(fields["messages"])
                error = self.error_of(reply)
                self.assertEqual((reply.status, error["param"]), (400, param), error)
                self.assertRegex(error["message"], words)

    def test_a_variable_of_any_other_name_is_the_templates_own(self) -> None:
        for name in ("tokenizer", "self", "enable_thinking", "bos_token"):
            self.assertEqual(self.chat(chat_template_kwargs={name: "x"}).status, 200, name)

    def test_what_asks_for_nothing_is_ignored(self) -> None:
        fields = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True,
                  "user": "me", "store": False, "modalities": ["text"]}
        self.assertEqual(self.chat(**fields).status, 200)


class NoTemplateTest(ServerCase):
    def test_it_is_said(self) -> None:
        error = self.refused(400, {"messages": [USER]}, "/v1/chat/completions")
        self.assertEqual((error["param"], error["message"]),
                         ("messages", "/messages: this model has no chat template; have it continue a text instead"))


class EchoedLogprobsTest(ServerCase):
    def test_those_of_the_engine(self) -> None:
        """What lm-eval reads: of the prompt's tokens and those that follow, or of the prompt's alone."""
        for length, n in ((0, 1), (1, 1), (4, 2)):
            for listed in (0, 3):
                fields = {"max_tokens": length, "temperature": 0, "echo": True, "logprobs": listed, "n": n}
                name = self.engine.submit(PROMPT, max(length, 1), prompt_logprobs=listed, logprobs=listed)
                expected = self.engine.result(name)
                whole = self.complete(PROMPT, **fields)
                self.assertEqual(whole["usage"]["completion_tokens"], length * n)
                decode = self.engine.tokenizer.decode
                tokens = (*PROMPT, *expected.tokens[:length])
                for choice in whole["choices"]:
                    given = choice["logprobs"]
                    self.assertEqual(choice["text"], decode(tokens))
                    self.assertEqual(given["tokens"], [decode([token]) for token in tokens])
                    scores = [score and score.logprob for score in expected.prompt_logprobs]
                    self.assertEqual(given["token_logprobs"], [*scores, *expected.logprobs[:length]])
                    self.assertEqual(given["text_offset"], list(range(len(tokens))))
                    self.assertIsNone(given["top_logprobs"][0])
                    for score, likeliest in zip(expected.prompt_logprobs[1:], given["top_logprobs"][1:]):
                        self.assertEqual(likeliest, {decode([other]): value for other, value in score.top_logprobs})
                    self.assertEqual(choice["finish_reason"], "length")
                chunks = self.stream(PROMPT, **fields)
                for index, choice in enumerate(whole["choices"]):
                    own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
                    self.assertEqual("".join(each["text"] for each in own), choice["text"])
                    for key, values in choice["logprobs"].items():
                        self.assertEqual([value for each in own for value in each["logprobs"][key]], values)

    def test_prompts_side_by_side(self) -> None:
        fields = {"max_tokens": 0, "echo": True, "logprobs": 1}
        together = self.complete([list(PROMPT), [7, 8]], **fields)["choices"]
        alone = [self.complete(prompt, **fields)["choices"][0] for prompt in (list(PROMPT), [7, 8])]
        self.assertEqual([choice["logprobs"] for choice in together], [choice["logprobs"] for choice in alone])
        self.assertEqual(json.loads(json.dumps(together[1]["logprobs"]["token_logprobs"]))[0], None)


if __name__ == "__main__":
    unittest.main()
