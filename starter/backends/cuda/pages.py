"""Optional · The KV pages on a device, and the one array of integers that is sent there in each step. (Pages of 8-bit
integers are in ``int8_pages.py``.)

The page manager decides on the host which request has which pages. For a step a kernel needs only the block tables and,
for each row of the batch, its request and its position:

    one array      [0 1 1 1 | 9 0 1 2 | 5 0 7  2 2 2]         a request with fewer pages repeats its first one
                    spans     positions  tables [2, 3]         (``attend`` never looks that far)

A page is one stretch of memory, [layers, page_size, kv_width] for keys and the same for values, so copying one for
copy-on-write or swapping is one copy of each. What free pages hold is never read.

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import warp as wp

from starter.backend import Batch
from starter.backends.cuda import kernels
from starter.backends.cuda.device import NUMBERS, Array, Device
from starter.kv_cache import KVStore


class CudaKVStore(KVStore):
    """``keys`` and ``values`` [pages * layers * page_size, kv_width], float32 or float16. ``copy_page`` also copies
    from a store on another device."""

    def __init__(self, device: Device, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int,
                 dtype: str) -> None:
        self.device, self.layers, self.head_width, self.page_size = device, layers, head_width, page_size
        self.kv_width = kv_heads * head_width
        self.width = layers * self.kv_width
        self.dtype = NUMBERS[dtype]
        self.page_bytes = page_bytes(self.width, page_size, dtype)
        rows = num_pages * layers * page_size
        self.keys, self.values = (device.empty((rows, self.kv_width), self.dtype) for _ in range(2))
        self._sent: tuple[Batch | None, Any] = None, None

    def attend(self, q: Array, k: Array, v: Array, layer: int, batch: Batch) -> Array:
        """``backend.Backend.attend`` over these pages."""
        write, attend = (kernels.forms[kernel, self.dtype] for kernel in (kernels.write_pages, kernels.attend))
        pages, out = self._pages_of(batch, layer), self.device.empty(q.shape)
        self.device.threads(write, k.shape, pages, k, v, self.keys, self.values)
        grid, group = (q.shape[0], q.shape[1] // self.head_width), q.shape[1] // self.kv_width
        self.device.blocks(attend, grid, pages, q, self.keys, self.values, self.head_width, group, out)
        return out

    def _pages_of(self, batch: Batch, layer: int) -> Any:
        """The step's block tables on the device, for a layer. They are kept for the other layers of the batch."""
        if self._sent[0] is not batch:
            self._sent = batch, send(batch, self.device, self.layers)[0]
        pages = self._sent[1]
        pages.layer = layer
        return pages

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        for place, part in zip(self._places(page, offset), self._parts()):
            for array, numbers in ((self.keys, key), (self.values, value)):
                row = np.asarray(numbers[part], dtype=np.float32)
                wp.copy(array[place:place + 1], wp.array(row[None], dtype=self.dtype, device="cpu"))

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        places = self._places(page, offset)
        key, value = ([number for place in places for number in array[place].numpy().tolist()]
                      for array in (self.keys, self.values))
        return key, value

    def _places(self, page: int, offset: int) -> list[int]:
        """Where the numbers of a slot lie, layer by layer."""
        return [(page * self.layers + layer) * self.page_size + offset for layer in range(self.layers)]

    def _parts(self) -> list[slice]:
        """Which numbers of a token belong to each layer."""
        return [slice(layer * self.kv_width, (layer + 1) * self.kv_width) for layer in range(self.layers)]

    def copy_page(self, source: int, target: int, origin: CudaKVStore | None = None) -> None:
        numbers, origin = self.page_size * self.width, origin or self
        for ours, theirs in ((self.keys, origin.keys), (self.values, origin.values)):
            wp.copy(ours, theirs, dest_offset=target * numbers, src_offset=source * numbers, count=numbers)


def page_bytes(width: int, page_size: int, dtype: str) -> int:
    """Bytes of a page of tokens with ``width`` numbers each for key and value."""
    return 2 * int(wp.types.type_size_in_bytes(NUMBERS[dtype])) * page_size * width


def send(batch: Batch, device: Device, layers: int, more: Sequence[int] = ()) -> tuple[Any, Array]:
    """The batch's spans, positions and block tables, and ``more`` integers, in one copy to the device."""
    rows, most = len(batch.tokens), max(len(span.pages) for span in batch.spans)
    spans = [number for number, span in enumerate(batch.spans) for _ in range(span.count)]
    tables = [page for span in batch.spans for page in (*span.pages, *[span.pages[0]] * (most - len(span.pages)))]
    sent: Array = device.put([*spans, *batch.positions, *tables, *more], wp.int32)
    pages, end = kernels.Pages(), 2 * rows + len(tables)
    pages.spans, pages.positions = sent[:rows], sent[rows:2 * rows]
    pages.tables = sent[2 * rows:end].reshape((len(batch.spans), most))
    pages.page_size, pages.layers = batch.page_size, layers
    return pages, sent[end:] if more else None
