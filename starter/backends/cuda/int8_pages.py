"""Optional · KV pages of 8-bit integers on a device: the format and the rule of ``backends/int8_pages.py``. The kernels
are in ``int8_kernels.py``.

A page is one stretch of each of five arrays. A page that is being filled also has a *tail*, its keys as floats: four
bytes a number, where both codes together take two. A tail for every page would cost most of what codes save, so tails
come from a pool of their own, and ``tails`` says which page has which.

    pages   [ 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | ... ]     codes, grids and scales
    tails   {5: 0, 2: 2}     page 5 has tail 0, page 2 tail 2; tail 1 is free
    pool    [ 0 | 1 | 2 ]                               float32 keys of all layers

``engine.make_cache`` computes how many tails a budget pays for, and ``reserve_tails`` takes their memory at once,
planned with all else. Sometimes more are needed, as when samples fork beyond max_running: then the pool doubles, by a
copy, as long as there is memory; if there is none, a BackendError ends the request that needed the tail.

The tail that each row writes to is sent with the block tables, once a step. No number comes back.

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import warp as wp

from starter.backend import Batch, Piece
from starter.backends.cuda import int8_kernels as kernels
from starter.backends.cuda.device import Array, Device
from starter.backends.cuda.pages import send
from starter.backends.int8_pages import ARRAYS, TailedStore, cut_by_page


class CudaInt8KVStore(TailedStore):
    """All floats are float32; the backend's ``dtype`` is that of its weights then. ``copy_page`` also copies from a
    store on another device, with the tail. ``scratch``: the bytes of a step's hidden states, for the memory plan."""

    def __init__(self, device: Device, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int,
                 scratch: int = 0) -> None:
        super().__init__(layers, kv_heads, head_width, num_pages, page_size)
        self.device, self.scratch = device, scratch
        grids = num_pages * layers
        slots = grids * page_size
        self.key_codes = device.empty((slots, self.row_width), wp.uint8)
        self.key_lows, self.key_scales = (device.empty((grids, self.row_width)) for _ in range(2))
        self.value_codes = device.empty((slots, self.row_width), wp.int8)
        self.value_scales = device.empty((slots, kv_heads))
        self.pool: Array = device.empty((0, self.row_width))
        self._sent: tuple[Batch | None, Any, Any, Array] = None, None, None, None

    # ------------------------------------------------------------------------------------------- tails

    @property
    def _pool_size(self) -> int:
        """Tails, free and in use."""
        return int(self.pool.shape[0]) // (self.layers * self.page_size)

    def reserve_tails(self, count: int) -> None:
        """Have a pool of ``count`` tails or more. BackendError, with nothing changed, if they do not fit."""
        if count > self._pool_size:
            self.device.memory.plan({"tails": count * self.tail_bytes, "scratch": self.scratch})
            self._grow(count)

    def _grow(self, count: int) -> None:
        pool = self.device.empty((count * self.layers * self.page_size, self.row_width))
        if self.tails:
            wp.copy(pool, self.pool, count=self.pool.size)
        self.pool = pool

    def _tails_of(self, pages: Sequence[int]) -> dict[int, int]:
        """The tails of these pages, opened if need be.

        The tails in use are looked up first. So a tail that another thread drops meanwhile, with a request that it
        cancels, is not given to a second page in the same step."""
        used = {*self.tails.values()}
        found = {page: self.tails.get(page, -1) for page in pages}
        new = [page for page, tail in found.items() if tail < 0]
        if (needed := len(used) + len(new)) > self._pool_size:
            self._grow(max(needed, min(2 * self._pool_size, self.num_pages)))
        free = (tail for tail in range(self._pool_size) if tail not in used)
        for page, tail in zip(new, free):
            found[page] = self.tails[page] = tail
        self.peak_tails = max(self.peak_tails, len(self.tails))
        return found

    # ------------------------------------------------------------------------------------------- a step

    def attend(self, q: Array, k: Array, v: Array, layer: int, batch: Batch) -> Array:
        """``backend.Backend.attend`` over these pages."""
        pages, cells = self._write_layer(k, v, layer, batch)
        out = self.device.empty(q.shape)
        grid, group = (q.shape[0], q.shape[1] // self.head_width), q.shape[1] // self.row_width
        self.device.blocks(kernels.attend_int8, grid, pages, q, cells, self.head_width, group, out)
        return out

    def _write_layer(self, k: Array, v: Array, layer: int, batch: Batch) -> tuple[Any, Any]:
        """Put the batch's rows into their slots; the tables and arrays on the device."""
        if self._sent[0] is not batch:
            self._sent = batch, *self._send(batch)  # kept for the other layers
        _, pages, cells, full = self._sent
        pages.layer = layer
        self.device.blocks(kernels.write_int8, (k.shape[0], self.kv_heads), pages, k, v, cells, self.head_width)
        if full is not None:
            self.device.threads(kernels.encode_keys, (full.shape[0], self.row_width), pages, full, cells)
        return pages, cells

    def _send(self, batch: Batch) -> tuple[Any, Any, Array]:
        """The tables, the arrays with the tail of each row's page, and the rows that fill a page. O(pages) calls."""
        parts = [part for span in batch.spans for part in cut_by_page(span, self.page_size)]
        owned = [part.pages[part.start // self.page_size] for part in parts]
        tails = self._tails_of(owned)
        rows = len(batch.tokens)
        own = [tail for page, part in zip(owned, parts) for tail in [tails[page]] * part.count]
        full = [part.first_row + part.count - 1 for part in parts if part.end % self.page_size == 0]
        pages, tails_and_full = send(batch, self.device, self.layers, [*own, *full])
        cells = kernels.Int8Pages()
        for name in ARRAYS:
            setattr(cells, name, getattr(self, name))
        cells.tails, cells.own = self.pool, tails_and_full[:rows]
        return pages, cells, tails_and_full[rows:] if full else None

    # --------------------------------------------------------------------------------------------- pages

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        batch = Batch.of([Piece([0], offset, (page,), False)], self.page_size)
        for layer in range(self.layers):
            part = slice(layer * self.row_width, (layer + 1) * self.row_width)
            self._write_layer(self.device.put([key[part]]), self.device.put([value[part]]), layer, batch)

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """Of a page that has its tail still, the key as it came; else both dequantized, in double precision."""
        tail = self.tails.get(page)
        keys, values = [], []
        for grid in range(page * self.layers, (page + 1) * self.layers):
            slot = grid * self.page_size + offset
            if tail is None:
                keys.append(_row(self.key_lows, grid) + _row(self.key_scales, grid) * _row(self.key_codes, slot))
            else:
                keys.append(_row(self.pool, slot + (tail - page) * self.layers * self.page_size))
            scales = np.repeat(_row(self.value_scales, slot), self.head_width)
            values.append(scales * _row(self.value_codes, slot))
        return np.concatenate(keys).tolist(), np.concatenate(values).tolist()

    def copy_page(self, source: int, target: int, origin: CudaInt8KVStore | None = None) -> None:
        origin = origin or self
        for name in ARRAYS:
            ours, theirs = getattr(self, name), getattr(origin, name)
            _copy(ours, target, theirs, source, ours.size // self.num_pages)
        self.drop_tail(target)
        if source in origin.tails:
            tail = self._tails_of([target])[target]  # which may move the pool
            _copy(self.pool, tail, origin.pool, origin.tails[source], self.page_size * self.width)


def _row(array: Array, row: int) -> Any:
    """On the host, in double precision."""
    return array[row].numpy().astype(np.float64)


def _copy(ours: Array, target: int, theirs: Array, source: int, numbers: int) -> None:
    """Copy the source-th stretch of ``numbers`` numbers to the target-th."""
    wp.copy(ours, theirs, dest_offset=target * numbers, src_offset=source * numbers, count=numbers)
