"""M1 · Text to token numbers and back, also token by token while they are being generated.

    encode("the cat")  -> [19, 7, 4, 0, 2, 0, 19]       decode(...) -> "the cat"

Two tokenizers satisfy the ``Tokenizer`` protocol:

    CharacterTokenizer   one token a character: the fixtures'
    Llama2cTokenizer     byte-pair encoding over a vocabulary with scores, as llama2.c reads it from a file

A token is not always text: "世" may be three tokens of one byte each. ``TextStream`` therefore holds bytes back until
a character is complete, so that what a reader has seen is never taken back, repeated, or shown as garbage.
"""

from __future__ import annotations

import struct
from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from math import isfinite
from pathlib import Path
from typing import Protocol

from .errors import RequestError, SchemaError
from .schema import CharacterVocabulary
from .weights import open_checkpoint

UNKNOWN, BOS, EOS = 0, 1, 2  # fixed by llama2.c
MAX_TOKENIZER_BYTES = 16 * 1024 * 1024


class Tokenizer(Protocol):
    """What the engine and its users may ask of any tokenizer. Subclasses inherit ``decode``."""

    vocab_size: int
    bos_token: int | None
    eos_tokens: tuple[int, ...]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Text -> tokens. They begin with the beginning-of-sequence token where the model has one and ``bos`` or the
        text (by starting with its name, such as "<s>", as chat templates do) asks for it; asked twice, it stands once.
        RequestError for text that cannot be written in this vocabulary."""

    def stream(self) -> TextStream:
        """Tokens -> text, one by one as they come."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens -> text; beginning and end of sequence are silent. RequestError for a token out of the vocabulary."""
        stream = self.stream()
        return "".join(map(stream.push, tokens)) + stream.finish()


class TextStream:
    """Incremental decoding: all ``push`` results and ``finish`` joined equal ``decode`` of all tokens.

    To continue a prompt, push its tokens first and drop what they return: then a character begun in the prompt, or
    the space that is silent after the beginning of the sequence, comes out right.
    """

    __slots__ = ("_before_text", "_begun", "_opening", "_previous", "_shown")

    def __init__(self, shown: Sequence[str | bytes], opening: Sequence[str | bytes] = (),
                 before_text: Collection[int | None] = ()) -> None:
        """``shown[token]`` is what a token adds, ``text_or_bytes`` of it; after those of ``before_text`` (None: nothing
        comes before the first token), where a text begins, it is ``opening[token]``."""
        self._shown, self._opening, self._before_text = shown, opening, before_text
        self._previous: int | None = None
        self._begun = b""  # of a character that is not complete

    def push(self, token: int) -> str:
        """The text that is certain with this token: no part of a character, perhaps nothing."""
        pieces = self._opening if self._previous in self._before_text else self._shown
        if not 0 <= token < len(pieces):
            raise RequestError(f"token {token} is outside the vocabulary; allowed: 0 to {len(pieces) - 1}")
        self._previous = token
        piece = pieces[token]
        if isinstance(piece, str):
            if not self._begun:  # as nearly always
                return piece
            piece = piece.encode()
        added = self._begun + piece
        text, used = utf_8_decode(added, "replace")  # as far as characters are complete
        self._begun = added[used:]
        return text

    def finish(self) -> str:
        """What was held back: "" or, for bytes that never became a character, U+FFFD."""
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


def text_or_bytes(piece: bytes) -> str | bytes:
    """A text, if these bytes are whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def _text_start(text: str, bos_name: str) -> int:
    """Where the text proper begins, behind the name of the beginning of the sequence if it opens with that."""
    if not isinstance(text, str):
        raise RequestError(f"a text is wanted, not a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"position {error.start} holds half of a surrogate pair, which is no character") from None
    start = 0
    while bos_name and text.startswith(bos_name, start):
        start += len(bos_name)
    return start


class CharacterTokenizer(Tokenizer):
    """One token a character; the specials' tokens come first and decode to nothing."""

    def __init__(self, vocabulary: CharacterVocabulary, bos_token: int | None = None,
                 eos_tokens: Sequence[int] = ()) -> None:
        self.bos_token, self.eos_tokens = bos_token, tuple(eos_tokens)
        self._shown = [""] * len(vocabulary.specials) + list(vocabulary.characters)
        self._tokens = {c: i for i, c in enumerate(vocabulary.characters, start=len(vocabulary.specials))}
        self.vocab_size = len(self._shown)
        names = dict(enumerate(vocabulary.specials))
        self._bos_name = "" if bos_token is None else names.get(bos_token, "")

    def encode(self, text: str, bos: bool = False) -> list[int]:
        start = _text_start(text, self._bos_name)
        tokens = [self.bos_token] if self.bos_token is not None and (bos or start) else []
        for position, character in enumerate(text[start:], start):
            if character not in self._tokens:
                raise RequestError(f"the character {character!r} at position {position} is not in the vocabulary; "
                                   f"allowed: {''.join(self._tokens)!r}")
            tokens.append(self._tokens[character])
        return tokens

    def stream(self) -> TextStream:
        return TextStream(self._shown)


class Llama2cTokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al. 2016) as in SentencePiece and llama2.c.

    ``pieces[token]`` is what a token stands for, "<0x0A>" being the byte 10; ``scores[token]`` how eagerly two
    neighbours merge into it. Token 1 begins a sequence, token 2 ends one; llama2.c's stories are delimited by token 1
    alone, so both end a generation.
    """

    bos_token: int | None = BOS
    eos_tokens: tuple[int, ...] = (BOS, EOS)

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(scores) != len(pieces) or not all(map(isfinite, scores)):
            raise SchemaError(f"every one of the {len(pieces)} pieces needs one finite score")
        self.vocab_size = len(pieces)
        self._pieces, self._scores = pieces, scores
        first = {piece: token for token, piece in reversed(list(enumerate(pieces)))}  # the first of equal pieces
        names = [b"<0x%02X>" % byte for byte in range(256)]
        if missing := [name.decode() for name in [*names, b" "] if name not in first]:
            raise SchemaError(f"the vocabulary has no piece {missing[0]!r}, without which some texts cannot be encoded")
        self._bytes = [first[name] for name in names]
        # What text may become. Control tokens and bytes' names are left out: writing "<0x0A>" must not be a new line.
        reserved = {UNKNOWN, BOS, EOS, *self._bytes}
        self._tokens = {piece: token for piece, token in first.items() if token not in reserved}
        self._bos_name = pieces[BOS].decode("utf-8", "replace").strip()
        meaning = {name: bytes([byte]) for byte, name in enumerate(names)}
        shown = [b"" if token in (BOS, EOS) else meaning.get(piece, piece) for token, piece in enumerate(pieces)]
        self._shown = list(map(text_or_bytes, shown))
        self._opening = [text_or_bytes(added[1:] if piece.startswith(b" ") else added)  # that space is encode's own
                         for piece, added in zip(pieces, shown)]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """As ``Tokenizer.encode``: a space, then the characters, then merges. O(n log n) in the length of the text."""
        start = _text_start(text, self._bos_name)
        tokens = self._merge(self._characters(" " + text[start:])) if len(text) > start else []
        return [BOS, *tokens] if bos or start else tokens

    def _characters(self, text: str) -> list[int]:
        """A token for each character or, where it has none, for each of its bytes."""
        tokens = []
        for piece in map(str.encode, text):
            tokens += [self._tokens[piece]] if piece in self._tokens else [self._bytes[byte] for byte in piece]
        return tokens

    def _merge(self, tokens: list[int]) -> list[int]:
        """Replace the neighbours with the best-scored union, the leftmost of equals, until none is in the vocabulary.

        A token stays at the index of its first character; ``after`` and ``before`` link the indices still in use.
        The heap may hold pairs that are no more: they are recognized when they come up.
        """
        size = len(tokens)
        after, before = list(range(1, size + 1)), list(range(-1, size - 1))

        def candidate(i: int) -> tuple[float, int, int, int, int] | None:
            """(order, index, both tokens, their union) of the pair at i and its right neighbour."""
            if i < 0 or after[i] == size:
                return None
            pair = tokens[i], tokens[after[i]]
            union = self._tokens.get(self._pieces[pair[0]] + self._pieces[pair[1]])
            return None if union is None else (-self._scores[union], i, *pair, union)

        heap = [found for i in range(size) if (found := candidate(i))]
        heapify(heap)
        while heap:
            _, i, left, right, union = heappop(heap)
            j = after[i]
            if tokens[i] != left or tokens[j] != right:  # as long as the left one stands, it has a right neighbour
                continue
            tokens[i], tokens[j] = union, -1  # -1: merged into its left neighbour
            after[i] = after[j]
            if after[j] < size:
                before[after[j]] = i
            for neighbour in (before[i], i):
                if found := candidate(neighbour):
                    heappush(heap, found)
        return [token for token in tokens if token >= 0]

    def stream(self) -> TextStream:
        return TextStream(self._shown, self._opening, (BOS,))


def read_llama2c_tokenizer(path: str | Path, vocab_size: int) -> Llama2cTokenizer:
    """llama2.c's tokenizer file: the int32 length of the longest piece, then for each token its float32 score,
    the int32 length of its piece, and the piece; little-endian. How many tokens there are, only the model says.

    One SchemaError that names the file for anything malformed. O(file).
    """
    with open_checkpoint(path) as (file, size):
        if size > MAX_TOKENIZER_BYTES:
            raise SchemaError(f"has {size} bytes; a tokenizer of at most {MAX_TOKENIZER_BYTES} is read")
        return Llama2cTokenizer(*_parse_pieces(file.read(), vocab_size))


def _parse_pieces(raw: bytes, vocab_size: int) -> tuple[list[bytes], list[float]]:
    longest, at = int.from_bytes(raw[:4], "little", signed=True), 4
    pieces: list[bytes] = []
    scores: list[float] = []
    for token in range(vocab_size):
        if at + 8 > len(raw):
            raise SchemaError(f"ends before token {token}; the model has {vocab_size} tokens")
        score, length = struct.unpack_from("<fi", raw, at)
        if not 0 <= length <= longest:
            raise SchemaError(f"token {token} has a piece of {length} bytes; 0 to {longest} are allowed")
        pieces.append(raw[at + 8:at + 8 + length])
        scores.append(score)
        at += 8 + length
    if at != len(raw):
        raise SchemaError(f"has {len(raw)} bytes where the {vocab_size} tokens of the model take {at}")
    return pieces, scores
