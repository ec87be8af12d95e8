"""Optional · Int8 pages in NumPy arrays: the format and the rule of ``backends/int8_pages.py``, byte for byte.

Here page, layer and head are axes of their own: ``key_codes[page, layer, head]`` is [head_width, page_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from starter.backends.int8_pages import ARRAYS, SMALLEST_SCALE, TailedStore
from starter.backends.numpy.attention import AttentionPlan, Group
from starter.backends.numpy.contexts import Room

Array = Any  # numpy.ndarray


def encode_keys(keys: Array) -> tuple[Array, Array, Array]:
    """``int8_pages.encode_keys`` of many channels: float32 [..., page_size] -> codes alike, low [...], scale [...]."""
    numbers = keys.astype(np.float64)
    finite = np.isfinite(numbers).all(axis=-1)
    numbers = np.where(finite[..., None], numbers, 0.0)
    low = numbers.min(axis=-1)
    scale = np.maximum((numbers.max(axis=-1) - low) / 255, SMALLEST_SCALE).astype(np.float32)
    codes = np.rint((numbers - low[..., None]) / scale[..., None]).astype(np.uint8)
    return codes, low, np.where(finite, scale, np.nan)


def encode_values(values: Array) -> tuple[Array, Array]:
    """``int8_pages.encode_value`` of many tokens: float32 [..., head_width] -> codes alike, scale [...]."""
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers).all(axis=-1)
    numbers = np.where(finite[..., None], numbers, 0.0)
    scale = np.maximum(abs(numbers).max(axis=-1) / 127, SMALLEST_SCALE).astype(np.float32)
    return np.rint(numbers / scale[..., None]).astype(np.int8), np.where(finite, scale, np.nan)


class NumpyInt8KVStore(TailedStore):
    """Keys and values of the whole pool as codes, and the tails of the pages that are being filled."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        super().__init__(layers, kv_heads, head_width, num_pages, page_size)
        blocks = (num_pages, layers, kv_heads)
        self.key_codes = np.zeros((*blocks, head_width, page_size), dtype=np.uint8)
        self.key_lows = np.zeros((*blocks, head_width), dtype=np.float32)
        self.key_scales = np.zeros((*blocks, head_width), dtype=np.float32)
        self.value_codes = np.zeros((*blocks, page_size, head_width), dtype=np.int8)
        self.value_scales = np.zeros((*blocks, page_size), dtype=np.float32)
        self.plan: AttentionPlan | None = None
        self._room = Room()

    def _new_tail(self) -> Array:
        return np.zeros((self.layers, self.kv_heads, self.page_size, self.head_width), dtype=np.float32)

    # ------------------------------------------------------------------------------------------- writing

    def write_layer(self, layer: Any, slots: Sequence[int], k: Array, v: Array) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots."""
        shape = (len(slots), self.kv_heads, self.head_width)
        pages, offsets = np.divmod(np.asarray(slots), self.page_size)
        codes, scales = encode_values(v.reshape(shape))
        self.value_codes[pages, layer, :, offsets], self.value_scales[pages, layer, :, offsets] = codes, scales
        starts = np.flatnonzero(np.diff(pages, prepend=-1)).tolist()  # of the rows that go to one page
        for start, end in pairwise((*starts, len(pages))):
            self._tail(int(pages[start]))[layer][:, offsets[start:end]] = k.reshape(shape)[start:end].swapaxes(0, 1)
        for page in pages[offsets == self.page_size - 1].tolist():  # these are full: every channel gets its grid
            codes, lows, scales = encode_keys(self._tail(page)[layer].swapaxes(1, 2))
            self.key_codes[page, layer], self.key_lows[page, layer], self.key_scales[page, layer] = codes, lows, scales

    # ------------------------------------------------------------------------------------------- reading

    def looks_the_same(self, group: Group) -> bool:
        """When a request begins a page, it sees the one before as codes, no longer as floats."""
        return all((end - 1) % self.page_size for end in group.ends)

    def gather(self, layer: int, group: Group) -> tuple[Array, Array]:
        """Keys [S, kv_heads, head_width, n] and values [S, kv_heads, n, head_width] that the rows of a group see, until
        the next call."""
        spans, longest, pages = len(group.ends), group.ends[-1], group.pages
        keys, values = self._room.of((*pages.shape, self.page_size, self.kv_heads, self.head_width))
        self._read_keys(keys, pages, layer)
        self._read_values(values, pages, layer)
        own = [len(table) - 1 for table in group.tables]  # the rows' own pages, as floats
        keys[range(spans), own] = np.stack([self._tail(table[-1])[layer] for table in group.tables]).swapaxes(1, 2)
        shape = (spans, -1, self.kv_heads, self.head_width)
        keys, values = keys.reshape(shape)[:, :longest], values.reshape(shape)[:, :longest]
        unwritten = np.arange(longest) >= np.array(group.ends)[:, None]
        keys[unwritten] = values[unwritten] = 0.0  # what an earlier owner left there may be anything
        return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)

    def newest(self, layer: int, group: Group) -> tuple[Array, Array]:
        """What the rows see of themselves, one row a span: [S, kv_heads, head_width] each."""
        pages, offsets = np.divmod(group.written, self.page_size)
        keys = np.stack([self._tail(page)[layer, :, offset] for page, offset in zip(pages.tolist(), offsets.tolist())])
        codes, scales = self.value_codes[pages, layer, :, offsets], self.value_scales[pages, layer, :, offsets]
        return keys, codes * scales[..., None]

    def _read_keys(self, keys: Array, pages: Any, layer: Any) -> None:
        """Full pages, dequantized, into [..., page_size, kv_heads, head_width]."""
        keys[:] = np.moveaxis(self.key_codes[pages, layer], -1, -3)  # floats first: mixed products are slower
        keys *= self.key_scales[pages, layer][..., None, :, :]
        keys += self.key_lows[pages, layer][..., None, :, :]

    def _read_values(self, values: Array, pages: Any, layer: Any) -> None:
        """Dequantized, into [..., page_size, kv_heads, head_width]."""
        values[:] = np.swapaxes(self.value_codes[pages, layer], -2, -3)
        values *= np.swapaxes(self.value_scales[pages, layer], -1, -2)[..., None]

    # --------------------------------------------------------------------------------------------- pages

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        self.plan = None  # and the contexts that it keeps, which may be of this page
        slot = page * self.page_size + offset
        keys, values = np.asarray([key, value], np.float32).reshape(2, self.layers, 1, -1)
        for layer in range(self.layers):
            self.write_layer(layer, [slot], keys[layer], values[layer])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        shape = self.layers, self.page_size, self.kv_heads, self.head_width
        key, value = (np.empty(shape, dtype=np.float32) for _ in range(2))
        self._read_keys(key, page, slice(None))
        self._read_values(value, page, slice(None))
        if page in self.tails:
            key[:] = self.tails[page].swapaxes(1, 2)
        return key[:, offset].ravel().tolist(), value[:, offset].ravel().tolist()

    def copy_page(self, source: int, target: int, origin: NumpyInt8KVStore | None = None) -> None:
        self.plan = None  # and the contexts that it keeps, which may be of this page
        origin = origin or self
        for name in ARRAYS:
            getattr(self, name)[target] = getattr(origin, name)[source]
        self.drop_tail(target)
        if source in origin.tails:
            self._tail(target)[:] = origin.tails[source]
