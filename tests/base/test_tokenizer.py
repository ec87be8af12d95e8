"""Tokenizers: text survives the round trip, also byte by byte."""

from __future__ import annotations

import random
import unittest
from collections.abc import Sequence

from starter.base.tokenizer import CharacterTokenizer, TextStream, Tokenizer, text_or_bytes
from starter.errors import RequestError
from starter.schema import CharacterVocabulary


def streamed(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, tokens), stream.finish()]


class TextStreamTest(unittest.TestCase):
    TEXTS = ("A 世ab", "é", "👩\u200d💻!", "a\u0301", "\U0010ffff\x00\x7f\x80", " ", "")

    def test_pieces_split_at_any_byte_join_to_the_text(self) -> None:  # K057
        for text in self.TEXTS:
            raw = text.encode()
            for i in range(len(raw) + 1):
                for j in range(i, len(raw) + 1):
                    pieces = [raw[:i], raw[i:j], raw[j:]]
                    stream = TextStream(pieces)
                    with self.subTest(pieces=pieces):
                        shown = [stream.push(token) for token in range(3)]
                        self.assertEqual("".join(shown), text)
                        self.assertEqual(stream.finish(), "")

    def test_what_is_shown_is_whole_characters_as_early_as_possible(self) -> None:
        raw = "a世b".encode()
        stream = TextStream([raw[i:i + 1] for i in range(len(raw))])
        self.assertEqual([stream.push(token) for token in range(len(raw))], ["a", "", "", "世", "b"])

    def test_any_bytes_decode_as_a_whole_and_as_a_stream_alike(self) -> None:
        for seed in range(300):
            draw = random.Random(seed)
            pieces = [bytes(draw.choice([*"世é👩 a".encode(), draw.randrange(256)]) for _ in range(draw.randrange(4)))
                      for _ in range(8)]
            stream = TextStream(pieces)
            with self.subTest(seed=seed):
                shown = "".join(map(stream.push, range(8))) + stream.finish()
                self.assertEqual(shown, b"".join(pieces).decode("utf-8", errors="replace"))

    def test_an_unfinished_character_becomes_a_replacement_character_once(self) -> None:
        stream = TextStream([b"\xe4\xb8"])
        self.assertEqual((stream.push(0), stream.finish(), stream.finish()), ("", "\ufffd", ""))

    def test_bytes_of_a_token(self) -> None:
        """F3 begins a character of four bytes, so alone it is no text; what is silent where a text begins is there."""
        stream = TextStream([b"\xf3", "世", "", b" a"], [b"\xf3", "世", "", b"a"], (None,))
        for _ in range(2):
            self.assertEqual([stream.bytes_of(token) for token in range(4)], [b"\xf3", b"\xe4\xb8\x96", b"", b" a"])
            stream.push(0)  # where the stream has got to does not matter
        for wrong in (-1, 4):
            with self.assertRaisesRegex(RequestError, f"token {wrong} is outside the vocabulary; allowed: 0 to 3"):
                stream.bytes_of(wrong)

    def test_knows_where_a_text_begins(self) -> None:
        stream = TextStream([b"", b" a", b" b"], [b"", b"a", b"b"], (None, 0))
        self.assertEqual([stream.push(token) for token in (1, 2, 0, 2, 1)], ["a", " b", "", "b", " a"])
        stream = TextStream([b"", b" a", b" b"], [b"", b"a", b"b"], (0,))
        self.assertEqual([stream.push(token) for token in (1, 0, 1)], [" a", "", "a"])

    def test_pieces_of_text_and_of_bytes_alike(self) -> None:
        """A table may hold what is whole characters as text: the same comes out, wherever the bytes were cut."""
        for seed in range(300):
            draw = random.Random(seed)
            raw = "".join(draw.choices("aé世👩", k=9)).encode()
            cuts = sorted(draw.choices(range(len(raw) + 1), k=6))
            pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)])]
            if draw.random() < 0.3:
                draw.shuffle(pieces)
            streams = TextStream(pieces), TextStream(list(map(text_or_bytes, pieces)))
            with self.subTest(seed=seed):
                shown, same = ([*map(stream.push, range(len(pieces))), stream.finish()] for stream in streams)
                self.assertEqual(shown, same)
                self.assertEqual("".join(shown), b"".join(pieces).decode(errors="replace"))

    def test_a_token_out_of_the_vocabulary_changes_nothing(self) -> None:
        stream = TextStream(["世".encode()[:1], "世".encode()[1:]])
        self.assertEqual(stream.push(0), "")
        for token in (-1, 2):
            with self.assertRaisesRegex(RequestError, f"token {token} is outside the vocabulary; allowed: 0 to 1"):
                stream.push(token)
        self.assertEqual(stream.push(1), "世")


class CharacterTokenizerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.tokenizer = CharacterTokenizer(CharacterVocabulary("ab 世\n", ("<pad>", "<s>", "</s>")), 1, [2])

    def test_specials_come_first_and_are_silent(self) -> None:
        self.assertEqual(self.tokenizer.vocab_size, 8)
        self.assertEqual((self.tokenizer.bos_token, self.tokenizer.eos_tokens), (1, (2,)))
        self.assertEqual(self.tokenizer.encode("ab 世\n"), [3, 4, 5, 6, 7])
        self.assertEqual(self.tokenizer.decode([0, 1, 3, 2, 4, 5, 6, 7, 2]), "ab 世\n")
        self.assertEqual(streamed(self.tokenizer, [1, 3, 2, 6]), ["", "a", "", "世", ""])

    def test_beginning_of_sequence_stands_once(self) -> None:  # K061
        for text, bos, wanted in (("ab", False, [3, 4]), ("ab", True, [1, 3, 4]), ("<s>ab", False, [1, 3, 4]),
                                  ("<s>ab", True, [1, 3, 4]), ("<s><s>ab", True, [1, 3, 4]), ("", True, [1]),
                                  ("<s>", True, [1]), ("", False, [])):
            with self.subTest(text=text, bos=bos):
                self.assertEqual(self.tokenizer.encode(text, bos), wanted)
        without = CharacterTokenizer(CharacterVocabulary("ab", ("<s>",)))
        self.assertEqual((without.bos_token, without.eos_tokens), (None, ()))
        self.assertEqual(without.encode("ab", bos=True), [1, 2])
        with self.assertRaisesRegex(RequestError, "'<' at position 0"):
            without.encode("<s>ab", bos=True)

    def test_unknown_characters_are_located(self) -> None:
        for text, words in (("abc", "'c' at position 2"), ("<s>a?", r"'\?' at position 4"),
                            ("a<s>", "'<' at position 1"), ("\ud800", "position 0 holds half of a surrogate")):
            with self.subTest(text), self.assertRaisesRegex(RequestError, words):
                self.tokenizer.encode(text)

    def test_a_large_vocabulary_is_not_listed_whole(self) -> None:
        characters = "".join(map(chr, range(0x4E00, 0x4E00 + 1_000)))
        with self.assertRaisesRegex(RequestError, "and 940 more characters") as caught:
            CharacterTokenizer(CharacterVocabulary(characters)).encode("x")
        self.assertLess(len(str(caught.exception)), 250)

    def test_what_is_no_text_is_refused(self) -> None:  # K049: an empty prompt is "", and nothing else passes for one
        for prompt in ([], [""], None, b"ab", 3):
            with self.subTest(prompt=prompt), self.assertRaisesRegex(RequestError, "expected a text"):
                self.tokenizer.encode(prompt)
        self.assertEqual((self.tokenizer.encode(""), self.tokenizer.decode([]), self.tokenizer.decode([1, 2, 1])),
                         ([], "", ""))

    def test_tokens_outside_the_vocabulary_are_refused(self) -> None:
        for token in (-1, self.tokenizer.vocab_size, 2**70):
            with self.subTest(token=token):
                with self.assertRaisesRegex(RequestError, f"token {token} .* 0 to {self.tokenizer.vocab_size - 1}"):
                    self.tokenizer.decode([3, token])
                stream = self.tokenizer.stream()
                with self.assertRaisesRegex(RequestError, f"token {token} "):
                    stream.push(token)

class BytesOfTest(unittest.TestCase):
    def test_characters_and_specials(self) -> None:
        tokenizer = CharacterTokenizer(CharacterVocabulary("aé世", ("<s>", "</s>")), 0, (1,))
        self.assertEqual([tokenizer.bytes_of(token) for token in range(5)],
                         [b"", b"", b"a", b"\xc3\xa9", b"\xe4\xb8\x96"])
        with self.assertRaisesRegex(RequestError, "token 5 is outside the vocabulary"):
            tokenizer.bytes_of(5)


if __name__ == "__main__":
    unittest.main()
