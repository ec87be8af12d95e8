"""M1 · llama2.c's tokenizer: byte-pair encoding over a vocabulary with scores, and the file it comes in."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import isfinite
from pathlib import Path

from starter.base.tokenizer import TextStream, Tokenizer, text_or_bytes, text_start
from starter.checkpoints.files import open_checkpoint
from starter.errors import SchemaError

UNKNOWN, BOS, EOS = 0, 1, 2  # fixed by llama2.c

MAX_TOKENIZER_BYTES = 16 * 1024 * 1024


class Llama2cTokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al. 2016) as in SentencePiece and llama2.c.

    ``pieces[token]`` is the text of a token ("<0x0A>" is the byte 10). Of all neighbours that could merge, those whose
    union has the highest ``scores[token]`` merge first. Token 1 begins a sequence and token 2 ends one; llama2.c's
    stories are separated by token 1 alone, so both end a generation. SchemaError if some text cannot be encoded.
    """

    bos_token: int | None = BOS
    eos_tokens: tuple[int, ...] = (BOS, EOS)

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(scores) != len(pieces) or not all(map(isfinite, scores)):
            raise SchemaError(f"every one of the {len(pieces)} pieces needs one finite score")
        self.vocab_size = len(pieces)
        self._pieces, self._scores = pieces, scores
        first = {piece: token for token, piece in reversed(list(enumerate(pieces)))}  # of equal pieces the first
        names = [b"<0x%02X>" % byte for byte in range(256)]
        if missing := [name.decode() for name in [*names, b" "] if name not in first]:
            raise SchemaError(f"the vocabulary has no piece {missing[0]!r}, without which some texts cannot be encoded")
        self._bytes = [first[name] for name in names]
        # The tokens that text may become: not control tokens, nor the names of bytes ("<0x0A>" is no line break).
        reserved = {UNKNOWN, BOS, EOS, *self._bytes}
        self._tokens = {piece: token for piece, token in first.items() if token not in reserved}
        self._bos_name = pieces[BOS].decode("utf-8", "replace").strip()
        meaning = {name: bytes([byte]) for byte, name in enumerate(names)}
        shown = [b"" if token in (BOS, EOS) else meaning.get(piece, piece) for token, piece in enumerate(pieces)]
        self._shown = list(map(text_or_bytes, shown))
        self._opening = [text_or_bytes(added[1:] if piece.startswith(b" ") else added)  # that space was added by encode
                         for piece, added in zip(pieces, shown)]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """As ``Tokenizer.encode``: a space is put before the text, then tokens of characters are merged. O(n log n) in
        the length of the text."""
        start = text_start(text, self._bos_name)
        tokens = self._merge(self._characters(" " + text[start:])) if len(text) > start else []
        return [BOS, *tokens] if bos or start else tokens

    def _characters(self, text: str) -> list[int]:
        """A token for each character or, if it has none, for each of its bytes."""
        tokens = []
        for piece in map(str.encode, text):
            tokens += [self._tokens[piece]] if piece in self._tokens else [self._bytes[byte] for byte in piece]
        return tokens

    def _merge(self, tokens: list[int]) -> list[int]:
        """Replace the neighbours with the best-scored union, the leftmost of equals, until none is in the vocabulary.

        A token keeps the index of its first character; ``after`` and ``before`` link the indices still in use. The heap
        may hold pairs that no longer exist; they are skipped when they come up.
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
            if tokens[i] != left or tokens[j] != right:  # an unmerged left one still has a right one
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
    """Read a tokenizer file: the int32 length of the longest piece, then for each token its float32 score, the int32
    length of its piece, and the piece; little-endian. The number of tokens is in the model file only.

    SchemaError that names the file for anything malformed. O(file).
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
