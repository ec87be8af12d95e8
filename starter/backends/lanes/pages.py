"""M4 · Attention on pages whose keys and values are integers in lanes (read ``lanes.py`` first).

A page keeps the keys of each head *transposed*: one long integer for each of the head's d numbers, with a token in each
lane. The values are kept the other way round: one long integer for each token, with a number in each lane. So both
products are a few long multiplications for each page:

    keys of a page, d = 2                        scores   =  q_0 * key 0  +  q_1 * key 1      all tokens at once
    key 0   | token 3 | token 2 | token 1 | token 0 |
    key 1   | token 3 | token 2 | token 1 | token 0 |

    values of a page                             output   =  p_0 * token 0  +  p_1 * token 1  +  ...
    token 0 | number 1 | number 0 |
    token 1 | number 1 | number 0 |

Fixed point: a number is stored as round(number / unit) in 16 bits, with the unit from the bound that the weights set
(``base/kv_bounds.py``: no number can exceed it; the little that rounded weights may add is cut off). A model whose
numbers may stay far below the bounds is refused (``backend.MOST_GROWTH``). Lanes have 32 bits:

- scores: q is scaled to an integer vector of length (2**31 - 1) / |longest key|, a power of two times its true size,
  so no score overflows (Cauchy-Schwarz) and a score is a number of 2**-e;
- softmax: exp comes from a table in steps of 1/512. Subtracting from the maximum, shifting and masking are three
  operations on the whole row of lanes: with scores in units of 2**-20 a shift by 11 leaves the distance from the
  largest in units of 2**-9, the index into the table. The weights p are integers, too;
- output: |sum p_t v_t| <= sum(p) * 2**15, so p is taken from the table whose sum stays under 2**16. (Each of n weights
  may have been rounded up by a half in either table, so n is set aside.) A weight below 2**-16 of the sum counts as
  none; with n positions of equal weight that is coarse from n = 8,192 on, which is the limit.

Every row is computed separately, in an order that depends on its position alone: batch equals solo, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, compress
from math import exp, hypot, isfinite, nan, sqrt
from operator import itemgetter, mul, truediv

from starter.backend import Batch, KVBounds, Span
from starter.backends.lanes.lanes import lane, largest_exponent, ones, pack, to_integers, unpack
from starter.kv_cache import KVStore

BITS = 32
MOST = 2**15 - 1  # of a stored number
STEPS = 9  # bits: the table of exp has 2**9 entries for each factor of e
TABLE = 2**16  # entries: down to exp(-128)
FULL = 2**16  # what integer attention weights may add up to
MOST_POSITIONS = 2**13

PageKeys = list[int]  # of a page in one layer: for each number of a key, head after head, the tokens in lanes
PageValues = list[list[int]]  # of a page in one layer: for each head, for each token, the numbers in lanes


@lru_cache(maxsize=32)
def exp_table(shift: int) -> tuple[int, ...]:
    """exp(-(i + 1/2) / 512), the middle of step i, in multiples of 2**(shift - 15); beyond exp(-12) all are 0."""
    above_zero = tuple(round(exp(-(i + 0.5) / 2**STEPS) * FULL / 2 ** (shift + 1)) for i in range(12 * 2**STEPS))
    return above_zero + (0,) * (TABLE - len(above_zero))


class LanesKVStore(KVStore):
    """Keys and values in lanes. The slots of a page are written in order; writing the first one empties the page."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int,
                 bounds: Sequence[KVBounds]) -> None:
        self.layers, self.kv_heads, self.head_width, self.page_size = layers, kv_heads, head_width, page_size
        self.row_width = kv_heads * head_width  # of one layer
        self.width = layers * self.row_width
        self.key_units = [[bound / MOST or 1.0 for bound in layer.keys] for layer in bounds]
        self.value_units = [[max(layer.values[i:i + head_width]) / MOST or 1.0  # one a head: it leaves the sum
                             for i in range(0, self.row_width, head_width)] for layer in bounds]
        self._key_factors = [[1.0 / unit for unit in units] for units in self.key_units]
        self._value_factors = [[1.0 / unit for unit in units for _ in range(head_width)] for units in self.value_units]
        self._scores: dict[int, list[float]] = {}
        self.keys: list[list[PageKeys]] = [[[] for _ in range(num_pages)] for _ in range(layers)]
        self.values: list[list[PageValues]] = [[[] for _ in range(num_pages)] for _ in range(layers)]
        self._reach = (2.0**31 - 1.0) / (MOST * sqrt(head_width)) - 0.5 * sqrt(head_width)
        # Bytes of integers as CPython keeps them: 24 and 4 for each 30 bits, and 8 for the reference.
        key_bytes = head_width * (32 + 4 * -(-page_size * BITS // 30))
        value_bytes = page_size * (32 + 4 * -(-head_width * BITS // 30))
        self.page_bytes = layers * kv_heads * (key_bytes + value_bytes)

    # ------------------------------------------------------------------------------------------- writing

    def write_layer(self, layer: int, slots: Sequence[int], k: Sequence[Sequence[float]],
                    v: Sequence[Sequence[float]]) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots. O(width) for each slot."""
        for slot, key, value in zip(slots, k, v):
            page, offset = divmod(slot, self.page_size)
            numbers = stored(key, self._key_factors[layer])
            values = stored(value, self._value_factors[layer])
            tokens = [pack(values[i:i + self.head_width], BITS) for i in range(0, self.row_width, self.head_width)]
            if offset == 0:
                self.keys[layer][page], self.values[layer][page] = numbers, [[token] for token in tokens]
            else:
                self._append(layer, page, offset, numbers, tokens)

    def _append(self, layer: int, page: int, offset: int, numbers: list[int], tokens: list[int]) -> None:
        columns, place = self.keys[layer][page], BITS * offset
        if offset < len(self.values[layer][page][0]):  # written again: take out what is there
            columns = [column - (lane(column, offset, BITS) << place) for column in columns]
        self.keys[layer][page] = [column + (number << place) for column, number in zip(columns, numbers)]
        for head, token in zip(self.values[layer][page], tokens):
            head[offset:offset + 1] = [token]

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        for layer in range(self.layers):
            part = slice(layer * self.row_width, (layer + 1) * self.row_width)
            self.write_layer(layer, [page * self.page_size + offset], [key[part]], [value[part]])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        keys = [lane(column, offset, BITS) for layer in self.keys for column in layer[page]]
        values = [number for layer in self.values for head in layer[page]
                  for number in unpack(head[offset], self.head_width, BITS)]
        return (list(map(truediv, keys, chain(*self._key_factors))),
                list(map(truediv, values, chain(*self._value_factors))))

    def copy_page(self, source: int, target: int, origin: LanesKVStore | None = None) -> None:
        origin = origin or self
        for layer in range(self.layers):
            self.keys[layer][target] = list(origin.keys[layer][source])
            self.values[layer][target] = [list(head) for head in origin.values[layer][source]]

    # ----------------------------------------------------------------------------------------- attention

    def attend(self, q: Sequence[Sequence[float]], layer: int, batch: Batch) -> list[list[float]]:
        """Attention of every row of the batch over its own request's positions up to its own (``backend.attend``).
        O(T * positions * width) digit products."""
        return [self._attend_row(q[span.first_row + i], layer, span, span.start + i + 1)
                for span in batch.spans for i in range(span.count)]

    def _attend_row(self, row: Sequence[float], layer: int, span: Span, seen: int) -> list[float]:
        width, pages = self.head_width, span.pages[:-(-seen // self.page_size)]
        group = len(row) // self.row_width  # query heads that share a kv head
        query = list(map(mul, row, self._score_units(layer, group)))
        length = hypot(*query)
        if not isfinite(length):
            return [nan] * len(row)
        # Scaled by a power of two, scores come in units of 2**-exponent; all heads together have one exponent.
        exponent = largest_exponent(length, self._reach)
        integers = to_integers(query, 2.0**exponent)
        keys, values = self.keys[layer], self.values[layer]
        out: list[float] = []
        for head in range(self.kv_heads):
            part = slice(head * width, (head + 1) * width)
            key_pages = [keys[page][part] for page in pages]
            tokens = list(chain.from_iterable([values[page][head] for page in pages]))
            for first in range(head * group * width, (head + 1) * group * width, width):
                weights = self._softmax(integers[first:first + width], exponent, key_pages, seen)
                mixed = sum(map(mul, filter(None, weights), compress(tokens, weights)))  # most weights are 0
                scale = self.value_units[layer][head] / sum(weights)
                out += [number * scale for number in unpack(mixed, width, BITS)]
        return out

    def _score_units(self, layer: int, group: int) -> list[float]:
        """What a score gains for each number of a query: the key's unit, and 1 / sqrt(d)."""
        if layer not in self._scores:
            width, units = self.head_width, self.key_units[layer]
            self._scores[layer] = [units[head * width + i] / sqrt(width)
                                   for head in range(self.kv_heads) for _ in range(group) for i in range(width)]
        return self._scores[layer]

    def _softmax(self, query: list[int], exponent: int, key_pages: list[PageKeys], seen: int) -> Sequence[int]:
        """Attention weights of the first ``seen`` tokens: integers that add up to at most ``FULL``."""
        if seen == 1:
            return (1,)
        half = ones(self.page_size, BITS) << BITS - 1  # makes every lane positive; distances stay the same
        scores = b"".join([(sum(map(mul, query, columns)) + half).to_bytes(4 * self.page_size, "little")
                           for columns in key_pages])[:4 * seen]
        highest = max(memoryview(scores).cast("I"))
        shift = min(BITS, max(0, exponent - STEPS))  # beyond BITS all are within a step of the table
        gaps = (highest * ones(seen, BITS) - int.from_bytes(scores, "little") >> shift) & _mask(seen, shift)
        indices = memoryview(gaps.to_bytes(4 * seen, "little")).cast("I").tolist()
        if exponent < STEPS:  # scores in the millions: steps of the table are finer than theirs
            indices = [index << STEPS - exponent for index in indices]
        weights = _look_up(indices, 0)
        surplus = sum(weights) // (FULL - seen)
        return _look_up(indices, surplus.bit_length()) if surplus else weights


def _look_up(indices: list[int], shift: int) -> tuple[int, ...]:
    """Entries of ``exp_table(shift)``, at least two; what lies beyond its end is its last, 0."""
    table = exp_table(shift)
    try:
        weights: tuple[int, ...] = itemgetter(*indices)(table)
    except IndexError:
        weights = itemgetter(*[min(index, TABLE - 1) for index in indices])(table)
    return weights


def stored(numbers: Sequence[float], factors: Sequence[float]) -> list[int]:
    """Numbers in units of 1 / factor. A number outside the bounds is cut, so no lane overflows."""
    integers = to_integers(list(map(mul, numbers, factors)), 1.0)
    if max(integers) > MOST or min(integers) < -MOST:
        return [max(-MOST, min(MOST, integer)) for integer in integers]
    return integers


@lru_cache(maxsize=512)
def _mask(count: int, shift: int) -> int:
    """The low BITS - shift bits of each lane: what a lane keeps after a shift to the right of them all."""
    return ones(count, BITS) * ((1 << BITS - shift) - 1)
