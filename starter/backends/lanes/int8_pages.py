"""M4, M5 · Attention in lanes straight from int8 pages. Read ``lanes.py`` and ``backends/int8_pages.py`` first.

A page's codes stay one byte each in memory. When attention looks at a page, a single slice assignment spreads its bytes
out, one to each lane of 32 bits. Keys lie channel after channel and values token after token, as the products need
them:

    codes of channel 0   | 7 | 0 | 255 | 31 |   -->   31 * 2**96 + 255 * 2**64 + 0 * 2**32 + 7

    score of token t  =  sum over channels of q_c (low_c + scale_c code_ct)
                      =  q . low                         one number for the page
                      +  sum of (q_c scale_c) code_ct    integers times lanes, all tokens at once
    output            =  sum over tokens of (p_t scale_t) code_t

No lane overflows: |q scale| is scaled to (2**31 - 1) / (255 sqrt(d)), by Cauchy-Schwarz; the integers p_t scale_t are
positive and add up to less than 2**24, times codes below 2**8 (their sign is removed by an offset of 128).

The numbers depend on a row's own pages alone, so batch equals solo bit for bit here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, isfinite, nan, sqrt
from operator import mul

from starter.backend import Batch, Span
from starter.backends.int8_pages import Int8KVStore
from starter.backends.lanes.lanes import largest_exponent, ones, to_integers, unpack

BITS = 32
FLIP = bytes(code ^ 128 for code in range(256))  # a signed byte -> the same plus 128, unsigned
FULL = 2.0**24  # what integer weights may add up to


class LanesInt8KVStore(Int8KVStore):
    """Int8 pages, and attention on them in lanes."""

    def attend(self, q: Sequence[Sequence[float]], layer: int, batch: Batch) -> list[list[float]]:
        """Attention of every row of the batch over its own request's positions up to its own (``backend.attend``)."""
        return [row for span in batch.spans for part in self.parts(span) for row in self._attend_part(q, layer, part)]

    def _attend_part(self, q: Sequence[Sequence[float]], layer: int, part: Span) -> list[list[float]]:
        """Rows of one page, which is the last that they see: of its keys the floats, of earlier pages the codes."""
        rows: list[list[float]] = [[] for _ in range(part.count)]
        own, width = part.start // self.page_size, self.head_width
        tail = self._tail(part.pages[own])
        group = len(q[part.first_row]) // self.row_width
        for head in range(self.kv_heads):
            blocks = [self._block(page, layer, head) for page in part.pages[:own + 1]]
            pages = [_KeyPage(self, block) for block in blocks[:-1]]
            keys = self._tail_keys(tail, layer, head)
            tokens = [token for block in blocks for token in self._token_lanes(block)]
            scales = [scale for block in blocks for scale in self._token_scales(block)]
            for i, out in enumerate(rows):
                seen = part.start + i + 1
                for first in range(head * group * width, (head + 1) * group * width, width):
                    query = [number / sqrt(width) for number in q[part.first_row + i][first:first + width]]
                    scores = [score for page in pages for score in page.scores(query)]
                    scores += [sum(map(mul, query, key)) for key in keys[:seen - len(scores)]]
                    out += mixed(scores, tokens, scales, width)
        return rows

    def _token_lanes(self, block: int) -> list[int]:
        """The values of a page, one integer a token: the numbers plus 128 in lanes."""
        size = self.page_size * self.head_width
        return spread(self.value_codes[block * size:(block + 1) * size].tobytes().translate(FLIP), self.head_width)

    def _token_scales(self, block: int) -> Sequence[float]:
        return self.value_scales[block * self.page_size:(block + 1) * self.page_size]


class _KeyPage:
    """The keys of a full page and head, ready for several queries."""

    def __init__(self, store: Int8KVStore, block: int) -> None:
        self.count, width = store.page_size, store.head_width
        channels = slice(block * width, (block + 1) * width)
        self.lows, self.scales = store.key_lows[channels], store.key_scales[channels]
        self.columns = spread(bytes(store.key_codes[block * width * self.count:(block + 1) * width * self.count]),
                              self.count)
        self._reach = (2.0**31 - 1.0) / (255.0 * sqrt(width)) - 0.5 * sqrt(width)

    def scores(self, query: Sequence[float]) -> list[float]:
        """query . key of every token."""
        steps = list(map(mul, query, self.scales))
        length = hypot(*steps)
        if not isfinite(length):
            return [nan] * self.count
        exponent = largest_exponent(length, self._reach)
        lanes = sum(map(mul, to_integers(steps, 2.0**exponent), self.columns))
        offset, unit = sum(map(mul, query, self.lows)), 2.0**-exponent
        return [offset + unit * number for number in unpack(lanes, self.count, BITS)]


def spread(codes: bytes, count: int) -> list[int]:
    """Bytes, ``count`` of them to an integer, each in a lane of its own."""
    wide = bytearray(4 * len(codes))
    wide[::4] = codes
    return [int.from_bytes(wide[i:i + 4 * count], "little") for i in range(0, len(wide), 4 * count)]


def mixed(scores: Sequence[float], tokens: Sequence[int], scales: Sequence[float], width: int) -> list[float]:
    """softmax(scores) times the values: [width]. Tokens beyond the scores are not seen."""
    highest = max(scores)
    if not isfinite(sum(scores)):
        return [nan] * width
    weights = [exp(score - highest) for score in scores]
    parts = list(map(mul, weights, scales))
    whole = sum(parts)
    if not isfinite(whole):
        return [nan] * width
    factor = (FULL - len(parts)) / whole
    integers = to_integers(parts, factor)
    lanes = sum(map(mul, integers, tokens)) - 128 * sum(integers) * ones(width, BITS)
    unit = 1.0 / (factor * sum(weights))
    return [unit * number for number in unpack(lanes, width, BITS)]
