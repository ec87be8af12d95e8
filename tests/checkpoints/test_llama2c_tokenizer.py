"""The tokenizers of llama2.c models: merges equal the quadratic textbook form, and one clear error for a bad file."""

from __future__ import annotations

import random
import struct
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path

from starter.base.tokenizer import Tokenizer
from starter.checkpoints.llama2c_tokenizer import Llama2cTokenizer, read_llama2c_tokenizer
from starter.errors import RequestError, SchemaError

STORIES = Path(__file__).resolve().parents[2].parent / "shared" / "models" / "stories260K"
CONTROL = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
BYTES = [f"<0x{byte:02X}>".encode() for byte in range(256)]
# Longer pieces and their scores; "bca" can be reached by two ways, "éa" only over a character that is no piece.
MERGES = {"ab": -1.0, "bc": -1.0, "abc": -5.0, "ca": -2.0, "bca": -3.0, " a": -4.0, "aa": -0.5, "世b": -6.0, "éa": -0.1,
          "  ": -7.0, "<s": -0.2, "<s>": -0.3}
PIECES = CONTROL + BYTES + [piece.encode() for piece in (*" abcs<>世", *MERGES)]
SCORES = [0.0] * (len(PIECES) - len(MERGES)) + list(MERGES.values())


def llama2c_tokenizer() -> Llama2cTokenizer:
    return Llama2cTokenizer(PIECES, SCORES)


def tokenizer_file(pieces: Sequence[bytes] = PIECES, longest: int | None = None) -> bytes:
    longest = max(map(len, pieces)) if longest is None else longest
    return struct.pack("<i", longest) + b"".join(
        struct.pack("<fi", score, len(piece)) + piece for piece, score in zip(pieces, SCORES, strict=True))


def encode_by_the_book(text: str, pieces: Sequence[bytes], scores: Sequence[float]) -> list[int]:
    """llama2.c's algorithm as described: merge the best-scored pair, the leftmost of equals, and look again."""
    def lookup(piece: bytes) -> int | None:
        return pieces.index(piece) if piece in pieces else None

    tokens: list[int] = []
    for character in " " + text if text else "":
        known = lookup(character.encode())
        tokens += [byte + 3 for byte in character.encode()] if known is None else [known]
    while True:
        best: tuple[float, int, int] | None = None
        for i in range(len(tokens) - 1):
            union = lookup(pieces[tokens[i]] + pieces[tokens[i + 1]])
            if union is not None and (best is None or scores[union] > best[0]):
                best = scores[union], i, union
        if best is None:
            return tokens
        tokens[best[1]:best[1] + 2] = [best[2]]


def streamed(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, tokens), stream.finish()]


class Llama2cTokenizerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.tokenizer = llama2c_tokenizer()

    def pieces(self, text: str) -> list[str]:
        return [PIECES[token].decode() for token in self.tokenizer.encode(text)]

    def test_bytes_of_a_token(self) -> None:
        """Tokens 3 to 258 are bytes. The space that encode puts first is in the bytes, and silent in the text."""
        tokenizer = llama2c_tokenizer()
        self.assertEqual([tokenizer.bytes_of(3 + byte) for byte in range(256)], [bytes([byte]) for byte in range(256)])
        self.assertEqual([tokenizer.bytes_of(token) for token in range(3)], [b"<unk>", b"", b""])
        token = PIECES.index(b" a")
        self.assertEqual((tokenizer.bytes_of(token), tokenizer.decode([1, token])), (b" a", "a"))
        for text in ("abc a", "世界 é", "🎉"):
            self.assertEqual(b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))), b" " + text.encode())

    def test_merges(self) -> None:
        for text, wanted in (
                ("a", [" a"]), ("b", [" ", "b"]), ("aa", [" ", "aa"]),  # aa scores better than " a"
                ("aaa", [" ", "aa", "a"]),  # the leftmost of equals
                ("babc", [" ", "b", "abc"]), ("bbca", [" ", "b", "bca"]), ("世b", [" ", "世b"]),
                ("é", [" ", "<0xC3>", "<0xA9>"]), ("éa", [" ", "<0xC3>", "<0xA9>", "a"]),  # bytes never merge
                ("\n", [" ", "<0x0A>"]), ("  ", ["  ", " "])):
            with self.subTest(text):
                self.assertEqual(self.pieces(text), wanted)

    def test_equals_the_quadratic_form(self) -> None:
        for seed in range(200):
            draw = random.Random(seed)
            text = "".join(draw.choice("aaabbbccc s世é\n👩") for _ in range(draw.randrange(40)))
            with self.subTest(seed=seed, text=text):
                self.assertEqual(self.tokenizer.encode(text), encode_by_the_book(text, PIECES, SCORES))

    def test_random_vocabularies_and_ties(self) -> None:
        for seed in range(60):
            draw = random.Random(seed)
            words = {"".join(draw.choice("ab ") for _ in range(draw.randrange(2, 6))) for _ in range(12)}
            pieces = CONTROL + BYTES + [piece.encode() for piece in (*" ab", *sorted(words))]
            scores = [float(draw.randrange(-3, 1)) for _ in pieces]  # few values: many ties
            text = "".join(draw.choice("ab ") for _ in range(60))
            with self.subTest(seed=seed, text=text):
                tokenizer = Llama2cTokenizer(pieces, scores)
                self.assertEqual(tokenizer.encode(text), encode_by_the_book(text, pieces, scores))

    def test_long_texts(self) -> None:
        for text, wanted in (("aa" * 20_000, 20_001), ("abc" * 10_000, 10_001), ("世" * 10_000, 10_001)):
            self.assertEqual(len(self.tokenizer.encode(text)), wanted)

    def test_round_trip(self) -> None:  # K059
        for seed in range(200):
            draw = random.Random(seed)
            text = "".join(draw.choice("  abc世é👩\n\x00") for _ in range(draw.randrange(12)))
            tokens = self.tokenizer.encode(text, bos=True)
            with self.subTest(seed=seed, text=text):
                self.assertEqual(self.tokenizer.decode(tokens), text)
                self.assertEqual("".join(streamed(self.tokenizer, tokens)), text)
                self.assertEqual(self.tokenizer.decode(tokens[1:]), " " + text if text else "")

    def test_one_space_is_silent_after_the_beginning_and_only_there(self) -> None:  # K059
        space, two, space_a, a = (PIECES.index(piece) for piece in (b" ", b"  ", b" a", b"a"))
        for tokens, wanted in (([space, space_a], "  a"), ([space_a, space_a], " a a"), ([1, space_a, space_a], "a a"),
                               ([1, space, space_a], " a"), ([1, two, a], " a"), ([1, a, space_a], "a a"),
                               ([1, space, space, a], " a"), ([two, space], "   "), ([1, 3 + 0x20, a], " a"),
                               ([space_a, 2, 1, space_a], " aa")):
            with self.subTest(tokens=tokens):
                self.assertEqual(self.tokenizer.decode(tokens), wanted)
                self.assertEqual("".join(streamed(self.tokenizer, tokens)), wanted)

    def test_byte_tokens_show_whole_characters(self) -> None:  # K057
        for text in ("A 世ab", "👩\u200d💻"):
            tokens = [3 + byte for byte in text.encode()]
            self.assertEqual(self.tokenizer.decode(tokens), text)
            self.assertEqual([shown for shown in streamed(self.tokenizer, tokens) if shown], list(text))

    def test_bytes_that_are_no_character_show_a_replacement_character(self) -> None:
        self.assertEqual(self.tokenizer.decode([3 + 0xE4, 3 + 0xB8]), "\ufffd")
        self.assertEqual(streamed(self.tokenizer, [3 + 0xE4, 3 + ord("a"), 3 + 0xE4]), ["", "\ufffda", "", "\ufffd"])

    def test_a_stream_that_continues_a_prompt(self) -> None:
        """Push the prompt, drop what it shows: the rest is what decoding everything adds."""
        tokens = self.tokenizer.encode("a世 é👩b", bos=True)
        for cut in range(1, len(tokens)):
            stream = self.tokenizer.stream()
            before = "".join(map(stream.push, tokens[:cut]))
            after = "".join(map(stream.push, tokens[cut:])) + stream.finish()
            self.assertEqual(before + after, "a世 é👩b")
            self.assertNotIn("\ufffd", before)

    def test_beginning_of_sequence_stands_once(self) -> None:  # K061
        plain = self.tokenizer.encode("ab")
        for text, bos, wanted in (("ab", True, [1, *plain]), ("<s>ab", False, [1, *plain]),
                                  ("<s>ab", True, [1, *plain]), ("<s><s>ab", True, [1, *plain]),
                                  ("", True, [1]), ("<s>", False, [1])):
            with self.subTest(text=text, bos=bos):
                self.assertEqual(self.tokenizer.encode(text, bos), wanted)
        self.assertNotIn(1, self.tokenizer.encode("ab <s>"))

    def test_text_never_becomes_a_control_token_or_a_byte(self) -> None:
        """Even where merges lead to their names, piece by piece."""
        names = ["<unk>", "\n</s>\n", "\n<s>\n", "<0x41>"]
        steps = [name[:length] for name in names for length in range(2, len(name))]
        pieces = CONTROL + BYTES + sorted({piece.encode() for piece in (*" \n<>/unks0x41", *steps)})
        tokenizer = Llama2cTokenizer(pieces, [0.0] * len(pieces))
        for name in names:
            tokens = tokenizer.encode("1" + name)
            self.assertFalse({0, 1, 2, 3 + 0x41} & set(tokens), name)
            self.assertEqual(tokenizer.decode(tokens), " 1" + name)

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

    def test_half_of_a_surrogate_pair_is_located(self) -> None:
        with self.assertRaisesRegex(RequestError, "position 2 "):
            self.tokenizer.encode("ab\udc00")

    def test_of_equal_pieces_the_first_counts(self) -> None:
        tokenizer = Llama2cTokenizer([*PIECES, b"a", b"<0x0A>"], [*SCORES, 0.0, 0.0])
        self.assertEqual(tokenizer.encode("ca\n"), self.tokenizer.encode("ca\n"))
        self.assertEqual(tokenizer.decode([len(PIECES), len(PIECES) + 1]), "a\n")

    def test_every_piece_has_one_finite_score(self) -> None:
        for scores in (SCORES[1:], [*SCORES, 0.0], [float("nan"), *SCORES[1:]], [*SCORES[1:], float("-inf")]):
            with self.assertRaisesRegex(SchemaError, "finite score"):
                Llama2cTokenizer(PIECES, scores)


class TokenizerFileTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "tok.bin"

    def read(self, content: bytes, vocab_size: int = len(PIECES)) -> Llama2cTokenizer:
        self.path.write_bytes(content)
        return read_llama2c_tokenizer(self.path, vocab_size)

    def refused(self, content: bytes, *words: str, vocab_size: int = len(PIECES)) -> None:
        with self.assertRaises(SchemaError) as caught:
            self.read(content, vocab_size)
        for word in (str(self.path), *words):
            self.assertIn(word, str(caught.exception))

    def test_read(self) -> None:
        tokenizer = self.read(tokenizer_file())
        self.assertEqual((tokenizer.vocab_size, tokenizer.bos_token, tokenizer.eos_tokens), (len(PIECES), 1, (1, 2)))
        self.assertEqual(tokenizer.encode("abcab 世b", bos=True), llama2c_tokenizer().encode("abcab 世b", bos=True))

    def test_cut_short_at_any_byte_or_longer(self) -> None:
        content = struct.pack("<i", 3) + b"".join(struct.pack("<fi", 0.0, 3) + b"abc" for _ in range(4))
        for length in range(len(content)):
            self.refused(content[:length], "token", vocab_size=4)
        content = tokenizer_file()
        for length in range(len(content) - 50, len(content)):
            self.refused(content[:length], "token")
        self.refused(content + b"\0", str(len(content)))

    def test_the_models_vocabulary_must_fit(self) -> None:
        for vocab_size in (0, 1, 259, len(PIECES) - 1, len(PIECES) + 1, 2**31 - 1):
            with self.subTest(vocab_size):
                self.refused(tokenizer_file(), str(vocab_size), vocab_size=vocab_size)

    def test_absurd_numbers(self) -> None:
        content = tokenizer_file()
        for longest in (0, 5, -1, -(2**31)):
            with self.subTest(longest=longest):
                self.refused(tokenizer_file(longest=longest), "token", "bytes")
        for length in (-1, 7, 2**31 - 1, -(2**31)):
            with self.subTest(length=length):
                self.refused(content[:8] + struct.pack("<i", length) + content[12:], "token 0", str(length))
        for score in (float("nan"), float("inf"), float("-inf")):
            with self.subTest(score=score):
                self.refused(content[:4] + struct.pack("<f", score) + content[8:], "finite score")

    def test_bytes_and_space_must_be_there(self) -> None:
        for piece in (b"<0x00>", b"<0xFF>", b" "):
            at = PIECES.index(piece)
            with self.subTest(piece):
                self.refused(tokenizer_file([*PIECES[:at], b"x", *PIECES[at + 1:]]), repr(piece.decode()))

    def test_files_that_cannot_be_opened_or_are_no_tokenizer(self) -> None:
        for path in (self.path, self.path.parent):
            with self.subTest(path=path), self.assertRaisesRegex(SchemaError, "cannot"):
                read_llama2c_tokenizer(path, 512)
        with open(self.path, "wb") as file:
            file.truncate(16 * 1024 * 1024 + 1)
        with self.assertRaisesRegex(SchemaError, "16777216"):
            read_llama2c_tokenizer(self.path, 512)


@unittest.skipUnless(STORIES.is_dir(), "the published model stories260K is not beside this repository")
class PublishedTokenizerTest(unittest.TestCase):
    def test_tok512(self) -> None:
        raw, at = (STORIES / "tok512.bin").read_bytes(), 4
        pieces, scores = [], []
        while at < len(raw):
            score, length = struct.unpack_from("<fi", raw, at)
            pieces.append(raw[at + 8:at + 8 + length])
            scores.append(score)
            at += 8 + length
        tokenizer = read_llama2c_tokenizer(STORIES / "tok512.bin", 512)
        for text in ("Once upon a time, there was a little girl named Lily.", "", " ", "  two  spaces", "世界 é\n\t",
                     "She said: \"Don't!\"", "aaaaaaaa", "a <s> <unk> <0x41>"):
            with self.subTest(text):
                tokens = encode_by_the_book(text, pieces, scores)
                self.assertEqual(tokenizer.encode(text, bos=True), [1, *tokens])
                self.assertEqual(tokenizer.decode([1, *tokens]), text)


if __name__ == "__main__":
    unittest.main()
