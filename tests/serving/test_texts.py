"""Text on its way: characters of several tokens, the beginning of a sequence, numbers that JSON cannot hold."""

from __future__ import annotations

import json
import time
import unittest
from typing import Any

from starter.backend import ReferenceBackend
from starter.base.tokenizer import CharacterTokenizer, TextStream, Tokenizer, text_start
from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.model import Loaded, Model
from starter.schema import CharacterVocabulary, EngineSettings
from starter.serving.completions import to_json, token_text
from tests.serving.support import ServerCase, post, read_until
from tests.support import CONFIG, WEIGHTS

PIECES = [*(bytes([byte]) for byte in "世界🙂é".encode()),  # four characters in twelve pieces
          b"a", b"b", b" c", "界b".encode(), b"\xff", b"", b"d", b"e"]


class ByteTokenizer(Tokenizer):
    """Tokens that are bytes, most of them parts of a character."""

    vocab_size, bos_token, eos_tokens = CONFIG.vocab_size, None, ()

    def encode(self, text: str, bos: bool = False) -> list[int]:
        raw = text[text_start(text, ""):].encode()
        try:
            return [PIECES.index(bytes([byte])) for byte in raw]
        except ValueError:
            raise RequestError(f"{text!r} holds a byte that is not in the vocabulary") from None

    def stream(self) -> TextStream:
        return TextStream(PIECES)


def engine_with(tokenizer: Tokenizer) -> InferenceEngine:
    loaded = Loaded(Model(CONFIG, WEIGHTS, ReferenceBackend()), tokenizer, {})
    return InferenceEngine(loaded, EngineSettings().override({"keep_events": 0}), time.monotonic)


class BytesTest(ServerCase):
    def serve(self, engine: InferenceEngine, **options: Any) -> None:
        super().serve(engine_with(ByteTokenizer()), **options)

    def test_characters_are_whole(self) -> None:
        """No chunk holds a part of one: each is UTF-8 by itself, and joined they are the whole text."""
        for seed in range(20):
            fields = {"max_tokens": 30, "seed": seed, "temperature": 3.0}
            whole = self.complete("世", **fields)["choices"][0]["text"]
            client = self.raw(post({"prompt": "世", "stream": True, **fields}))
            raw = read_until(client, b"0\r\n\r\n")
            events = [line.decode("utf-8") for line in raw.split(b"\n") if line.startswith(b"data: {")]
            self.assertEqual("".join(json.loads(event[6:])["choices"][0]["text"] for event in events), whole)
            expected = self.engine.result(self.engine.submit("世", **fields)).text  # type: ignore[arg-type]
            self.assertEqual(whole, expected)

    def test_names_of_tokens(self) -> None:
        """A part of a character has no text of its own, so its number stands for it; so no two names are the same."""
        names = [token_text(self.engine.tokenizer, token) for token in range(CONFIG.vocab_size)]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual((names[0], names[12], names[14]), ("token_id:0", "a", " c"))
        self.assertEqual(token_text(self.engine.tokenizer, 12, as_number=True), "token_id:12")
        logprobs = self.complete("a", max_tokens=20, logprobs=3, seed=1)["choices"][0]["logprobs"]
        self.assertTrue(set(logprobs["tokens"]) <= set(names))
        for name, likeliest in zip(logprobs["tokens"], logprobs["top_logprobs"]):
            self.assertIn(name, likeliest)
            self.assertIn(len(likeliest), (3, 4))

    def test_what_was_begun_in_the_prompt(self) -> None:
        """A prompt of tokens may end within a character; echoed, the text goes on where it stopped."""
        for length, text in ((4, "\ufffd"), (5, "界")):  # the first ends in mid-character, too
            prompt, fields = list(range(length)), {"logit_bias": {str(length): 1e6}, "max_tokens": 1, "temperature": 0}
            self.assertEqual(self.complete(prompt, **fields)["choices"][0]["text"], text)
            self.assertEqual(self.complete(prompt, **fields, echo=True)["choices"][0]["text"], "世" + text)


class BeginningTest(ServerCase):
    def serve(self, engine: InferenceEngine, **options: Any) -> None:
        vocabulary = CharacterVocabulary("abcdefghijklmnopqr", ("<s>", "</s>"))
        super().serve(engine_with(CharacterTokenizer(vocabulary, bos_token=0, eos_tokens=(1,))), **options)

    def tokens(self, text: str, **fields: object) -> list[int]:
        return self.ask("POST", "/tokenize", {"prompt": text, **fields}).document["tokens"]  # type: ignore[no-any-return]

    def test_it_begins_once(self) -> None:
        """A text, one that names the beginning itself, one that names it twice; never twice in the tokens."""
        for text in ("ab", "<s>ab", "<s><s>ab"):
            self.assertEqual(self.tokens(text), [0, 2, 3])
            self.assertEqual(self.complete(text, max_tokens=1)["usage"]["prompt_tokens"], 3)
        self.assertEqual(self.tokens("ab", add_special_tokens=False), [2, 3])
        self.assertEqual(self.complete("ab", max_tokens=1, add_special_tokens=False)["usage"]["prompt_tokens"], 2)

    def test_an_empty_text_is_the_beginning(self) -> None:
        for prompt in ("", [""], "<s>", [0]):
            self.assertEqual(self.complete(prompt, max_tokens=3)["usage"]["prompt_tokens"], 1)
        self.assertEqual(self.refused(400, {"prompt": "", "add_special_tokens": False})["param"], "prompt")

    def test_no_text_becomes_a_control_token(self) -> None:
        """But for the beginning, at the beginning: within a text, its name is refused or spelled out."""
        for text in ("a<s>", "</s>", "<s></s>"):
            self.assertIn("is not in the vocabulary", self.refused(400, {"prompt": text})["message"])


class NumbersTest(ServerCase):
    def test_every_logprob_is_a_number(self) -> None:
        """JSON has no infinity: with all but one token ruled out, with one candidate, with a bias to the limit."""
        bias = {str(token): -1e6 for token in range(1, 20)}
        for fields in ({"top_k": 1, "logprobs": 5}, {"logit_bias": bias, "logprobs": 20},
                       {"logit_bias": {"3": 1e6}, "logprobs": 20}, {"top_p": 0.0, "logprobs": 0},
                       {"temperature": 1e6, "logprobs": 20}, {"temperature": 1e-9, "logprobs": 1}):
            logprobs = self.complete(max_tokens=6, **fields)["choices"][0]["logprobs"]
            self.assertEqual(len(logprobs["tokens"]), 6)
            for name, number, likeliest in zip(logprobs["tokens"], logprobs["token_logprobs"],
                                               logprobs["top_logprobs"]):
                self.assertLessEqual(number, 0.0)
                self.assertEqual(likeliest[name], number)
            self.stream(max_tokens=6, **fields)

    def test_what_cannot_be_encoded(self) -> None:
        self.assertEqual(to_json({"a": "\ud800中"}), '{"a": "?中"}'.encode())
        with self.assertRaises(ValueError):
            to_json({"a": float("nan")})


if __name__ == "__main__":
    unittest.main()
