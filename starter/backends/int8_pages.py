"""M4, M5 · KV pages of 8-bit integers: the format and the rule of all backends, and a store in plain Python.

A page takes about a third of the bytes that it takes as float32, at a stated error.

One page of one layer and one key/value head, with page_size 4 and head_width 3:

              keys: a grid for each channel               values: a grid for each token
    token        0     1     2     3                   channel     0     1     2
    channel 0 [code, code, code, code]  low, scale     token 0  [code, code, code]  scale
    channel 1 [code, code, code, code]  low, scale     token 1  [code, code, code]  scale
    channel 2 [code, code, code, code]  low, scale     token 2  [code, code, code]  scale
                                                       token 3  [code, code, code]  scale
    key'   = low + scale * code, code 0 .. 255         value' = scale * code, code -127 .. 127

    |key - key'| <= scale / 2 and |value - value'| <= scale / 2, each with its own scale, plus the rounding of the sum

Keys have *outlier channels*, far from zero in every token. One grid for all channels of a token would spend most of its
256 points on the distance to them; a grid for each channel covers just that channel's numbers. Values have no such
channels.

A channel's grid is known when its page is full. Until then the page's keys stay float32, in its *tail* (the values
need not wait). One rule makes who sees what independent of batching, chunking, preemption and sharing:

    a query at position p sees the keys of its own page, p // page_size, as floats, those of earlier pages as codes

The codes are made when a page's last slot is written. Within the same step the page's own rows still look at the tail,
and later rows look at the codes. The tail is dropped only when the step has succeeded (``KVCacheManager.commit``):
until then the step may fail or be interrupted, and is computed again from the same floats. The page size is part of the
format: smaller pages have finer grids, and more of them.

``lanes/``, ``numpy/`` and ``cuda/`` keep this format in stores of their own, follow this rule, and make the same codes,
lows and scales of the same floats. So "batch equals solo" holds bit for bit where it does for the floats ("reference",
"cpu"). On "numpy" and "cuda" the last bit of a float may decide between two codes: the logits are within 1e-4 where it
decides none, and within 1e-2 where it does.

Source: Liu et al. 2024, "KIVI" (keys by channel, values by token, the newest keys unquantized; there 2 bits, and the
unquantized part is a buffer of its own, which here is the page itself).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import Any

from starter.backend import Row, Span
from starter.kv_cache import KVStore

SMALLEST_SCALE = 2.0**-126  # below it float32 loses precision; the scale of a constant channel, whose codes are all 0
ARRAYS = ("key_codes", "key_lows", "key_scales", "value_codes", "value_scales")  # of a store of any backend


def float32(number: float) -> float:
    """The nearest float32."""
    return array("f", [number])[0]


def encode_keys(numbers: Row) -> tuple[bytes, float, float]:
    """One channel's float32 numbers over the tokens of a page -> codes, low, scale.

    Every number comes back within scale / 2: it is rounded in units of the scale as it is stored, and no code is out of
    range, since 255 such scales miss the channel's range by 2**-16 of one at most. NaN or infinity comes back as NaN.
    """
    if not isfinite(sum(numbers)):
        return bytes(len(numbers)), 0.0, nan
    low = min(numbers)
    scale = float32(max((max(numbers) - low) / 255, SMALLEST_SCALE))
    return bytes(round((number - low) / scale) for number in numbers), low, scale


def encode_value(numbers: Row) -> tuple[list[int], float]:
    """One token's numbers of a head -> codes, scale; the same bound. NaN or infinity comes back as NaN."""
    if not isfinite(sum(numbers)):
        return [0] * len(numbers), nan
    scale = float32(max(max(map(abs, numbers)) / 127, SMALLEST_SCALE))
    return [round(number / scale) for number in numbers], scale


def cut_by_page(span: Span, page_size: int) -> Iterator[Span]:
    """The parts of a span whose rows lie in one page each."""
    next_page = (span.start // page_size + 1) * page_size
    for start, end in pairwise((span.start, *range(next_page, span.end, page_size), span.end)):
        yield Span(span.first_row + start - span.start, end - start, end, span.pages, span.page_size)


def page_bytes(layers: int, kv_heads: int, head_width: int, page_size: int) -> int:
    """Bytes of a page: codes, a low and a scale for each channel, and a scale for each token and head."""
    width = layers * kv_heads * head_width
    return 2 * page_size * width + 2 * 4 * width + 4 * page_size * layers * kv_heads


class TailedStore(KVStore):
    """What the int8 stores of all backends have in common: their sizes, and which pages have a tail."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        self.layers, self.kv_heads, self.head_width = layers, kv_heads, head_width
        self.num_pages, self.page_size = num_pages, page_size
        self.row_width = kv_heads * head_width  # of one layer
        self.width = layers * self.row_width
        self.page_bytes = page_bytes(layers, kv_heads, head_width, page_size)
        self.tail_bytes = 4 * page_size * self.width
        self.tails: dict[int, Any] = {}  # by page, in the backend's form

    def _new_tail(self) -> Any:
        """Room for float32 [layers, kv_heads, page_size, head_width], the keys as they came."""
        return zeros(self.page_size * self.width)

    def _tail(self, page: int) -> Any:
        """The page's tail, opened if need be. (Another thread may have cancelled the request that is being computed,
        and its tail is gone; what its last rows see then is never used.)"""
        tail = self.tails.get(page)
        if tail is None:
            tail = self.tails[page] = self._new_tail()
            self.peak_tails = max(self.peak_tails, len(self.tails))
        return tail

    def drop_tail(self, page: int) -> None:
        self.tails.pop(page, None)

    def parts(self, span: Span) -> Iterable[Span]:
        """Rows of different pages see different numbers."""
        return [span] if span.count == 1 else cut_by_page(span, self.page_size)


class Int8KVStore(TailedStore):
    """Keys and values of the whole pool as codes, and the tails of the pages that are being filled.

    A *block* is one page of one layer and one head, number (page * layers + layer) * kv_heads + head. Block after
    block, so that a page is one stretch of each array:

        key_codes    uint8    [blocks, head_width, page_size]    value_codes   int8     [blocks, page_size, head_width]
        key_lows     float32  [blocks, head_width]               value_scales  float32  [blocks, page_size]
        key_scales   float32  [blocks, head_width]

    Slots of a page are written in their order, as a request fills it. What an earlier owner left behind is never read.
    """

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        super().__init__(layers, kv_heads, head_width, num_pages, page_size)
        tokens = num_pages * page_size
        self.key_codes = bytearray(tokens * self.width)
        self.key_lows = zeros(num_pages * self.width)
        self.key_scales = zeros(num_pages * self.width)
        self.value_codes = array("b", bytes(tokens * self.width))
        self.value_scales = zeros(tokens * layers * kv_heads)

    # ------------------------------------------------------------------------------------------- writing

    def write_layer(self, layer: int, slots: Sequence[int], k: Sequence[Row], v: Sequence[Row]) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots."""
        size, width = self.page_size, self.head_width
        for slot, key, value in zip(slots, k, v):
            page, offset = divmod(slot, size)
            tail = self._tail(page)
            for head in range(self.kv_heads):
                part, block = slice(head * width, (head + 1) * width), self._block(page, layer, head)
                self._write_value(block * size + offset, value[part])
                tail[self._tail_row(layer, head, offset)] = array("f", key[part])
                if offset == size - 1:
                    self._encode_keys(block, self._tail_keys(tail, layer, head))

    def _write_value(self, row: int, numbers: Row) -> None:
        codes, self.value_scales[row] = encode_value(numbers)
        self.value_codes[row * self.head_width:(row + 1) * self.head_width] = array("b", codes)

    def _encode_keys(self, block: int, rows: Sequence[Row]) -> None:
        """The page is full: give every channel its grid."""
        for channel, numbers in enumerate(zip(*rows), block * self.head_width):
            codes, self.key_lows[channel], self.key_scales[channel] = encode_keys(numbers)
            self.key_codes[channel * self.page_size:(channel + 1) * self.page_size] = codes

    # ------------------------------------------------------------------------------------------- reading

    def context(self, layer: int, head: int, span: Span) -> tuple[list[Row], list[Row]]:
        """Keys that the rows of a part see, and the values transposed: [end][head_width], [head_width][end]."""
        own = span.start // self.page_size  # index of the rows' own page
        blocks = [self._block(page, layer, head) for page in span.pages[:own + 1]]
        tail = self._tail(span.pages[own])
        keys = [row for block in blocks[:-1] for row in self._keys(block)]
        keys += self._tail_keys(tail, layer, head)
        values = [row for block in blocks for row in self._values(block)]
        return keys[:span.end], list(zip(*values[:span.end]))

    def _keys(self, block: int) -> list[Row]:
        """A full page's keys, dequantized: [page_size][head_width]."""
        size, channels = self.page_size, range(block * self.head_width, (block + 1) * self.head_width)
        return list(zip(*(
            [self.key_lows[channel] + self.key_scales[channel] * code
             for code in self.key_codes[channel * size:(channel + 1) * size]] for channel in channels)))

    def _values(self, block: int) -> list[Row]:
        """A page's values, dequantized: [page_size][head_width]."""
        width = self.head_width
        return [[self.value_scales[row] * code for code in self.value_codes[row * width:(row + 1) * width]]
                for row in range(block * self.page_size, (block + 1) * self.page_size)]

    # --------------------------------------------------------------------------------------------- pages

    def write(self, page: int, offset: int, key: Row, value: Row) -> None:
        for layer in range(self.layers):
            part = slice(layer * self.row_width, (layer + 1) * self.row_width)
            self.write_layer(layer, [page * self.page_size + offset], [key[part]], [value[part]])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """The key as it came while its page has a tail, else dequantized; the value dequantized."""
        key: list[float] = []
        value: list[float] = []
        tail = self.tails.get(page)
        for layer in range(self.layers):
            for head in range(self.kv_heads):
                block = self._block(page, layer, head)
                key += self._keys(block)[offset] if tail is None else tail[self._tail_row(layer, head, offset)]
                value += self._values(block)[offset]
        return key, value

    def copy_page(self, source: int, target: int, origin: Int8KVStore | None = None) -> None:
        origin = origin or self
        for name in ARRAYS:
            ours, theirs = getattr(self, name), getattr(origin, name)
            size = len(ours) // self.num_pages
            ours[target * size:(target + 1) * size] = theirs[source * size:(source + 1) * size]
        self.drop_tail(target)
        if source in origin.tails:
            self._tail(target)[:] = origin.tails[source]

    def _block(self, page: int, layer: int, head: int) -> int:
        return (page * self.layers + layer) * self.kv_heads + head

    def _tail_row(self, layer: int, head: int, offset: int) -> slice:
        """Where a tail holds the key of a slot."""
        start = ((layer * self.kv_heads + head) * self.page_size + offset) * self.head_width
        return slice(start, start + self.head_width)

    def _tail_keys(self, tail: array[float], layer: int, head: int) -> list[Row]:
        """The keys of a tail: [page_size][head_width]."""
        return [tail[self._tail_row(layer, head, offset)] for offset in range(self.page_size)]


def zeros(count: int) -> array[float]:
    """``count`` float32 zeros."""
    return array("f", bytes(4 * count))
