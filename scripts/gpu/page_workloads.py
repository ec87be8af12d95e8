"""The kernels of K/V pages at a size at which their speed can be seen: of floats, and of 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import warp as wp

from scripts.gpu.workload import Size, Workload, draw
from starter.backends.cuda import int8_kernels as int8
from starter.backends.cuda import kernels
from starter.backends.cuda.device import NUMBERS, Device
from starter.backends.numpy.int8_pages import encode_keys, encode_values


def float_pages(device: Device, size: Size, rng: Any, dtype: str) -> Iterator[Workload]:
    """Writing a step's keys and values; attention of a decode batch, and of a chunk of one request's prompt."""
    tables, width = _tables(size, rng), size.kv_heads * size.head_width
    shape, itemsize = (tables.size * size.page_size, width), np.dtype(dtype).itemsize
    keys, values = (draw(rng, *shape).astype(dtype) for _ in range(2))
    stored = [device.put(numbers, NUMBERS[dtype]) for numbers in (keys, values)]
    everyone, ends = np.arange(size.requests), np.full(size.requests, size.context - 1)
    k, v = draw(rng, size.requests, width), draw(rng, size.requests, width)
    a, b = device.put(k), device.put(v)
    targets = [device.put(np.zeros(shape, np.float32), NUMBERS[dtype]) for _ in range(2)]
    slots = _slots(tables, everyone, ends, size.page_size)
    last = _step(device, tables, everyone, ends, size.page_size)
    yield Workload("write_pages", f"{dtype}, {size.requests} x {width}",
                   lambda: device.threads(kernels.write_pages, k.shape, last, a, b, *targets),
                   lambda: np.stack([target.numpy()[slots] for target in targets]),
                   lambda: np.stack([k, v]).astype(dtype).astype(float), None, 2 * (4 + itemsize) * k.size, 0)

    def launch(pages: Any, q: Any, out: Any, grid: Any, spans: Any, positions: Any) -> Callable[[], None]:
        return lambda: device.blocks(kernels.attend, grid, pages, q, *stored, size.head_width, size.group, out)

    yield from _attention(device, size, rng, tables, ("attend", dtype), launch, keys, values,
                          lambda spans, positions: 2 * itemsize * width * len(np.unique(spans)) * size.context, 4)


def int8_pages(device: Device, size: Size, rng: Any) -> Iterator[Workload]:
    """Writing a step's keys and values, the grids of pages that are full, and attention as above. A row's own page is
    here the same as floats and as codes, which makes NumPy's side short; that it is read as floats is tested
    elsewhere."""
    tables, width = _tables(size, rng), size.kv_heads * size.head_width
    slots = tables.size * size.page_size
    codes = rng.integers(0, 256, (slots, width), np.uint8), rng.integers(-127, 128, (slots, width), np.int8)
    lows, scales = draw(rng, tables.size, width), rng.random((tables.size, width), np.float32) / 64
    value_scales = rng.random((slots, size.kv_heads), np.float32) / 64
    keys = np.repeat(scales, size.page_size, axis=0) * codes[0] + np.repeat(lows, size.page_size, axis=0)
    values = np.repeat(value_scales, size.head_width, axis=1) * codes[1]
    stored = [device.put(codes[0], wp.uint8), device.put(lows), device.put(scales), device.put(codes[1], wp.int8),
              device.put(value_scales)]
    yield from _int8_writing(device, size, rng, tables)

    def launch(pages: Any, q: Any, out: Any, grid: Any, spans: Any, positions: Any) -> Callable[[], None]:
        owned, own = np.unique(tables[spans, positions // size.page_size], return_inverse=True)
        tails = keys.reshape(-1, size.page_size, width)[owned].reshape(-1, width)
        cells = _cells(stored, device.put(tails), device.put(own.reshape(-1), wp.int32))
        return lambda: device.blocks(int8.attend_int8, grid, pages, q, cells, size.head_width, size.group, out)

    def nbytes(spans: Any, positions: Any) -> int:
        """Of each request: values and their scales, codes and grids of keys in earlier pages, its rows' own keys."""
        first, last = (int(end) // size.page_size * size.page_size for end in (min(positions), max(positions)))
        return len(np.unique(spans)) * (size.context * (width + 4 * size.kv_heads) + last * width
                                        + last // size.page_size * 8 * width + (size.context - first) * 4 * width)

    yield from _attention(device, size, rng, tables, ("attend_int8", "int8"), launch, keys, values, nbytes, 6)


def _int8_writing(device: Device, size: Size, rng: Any, tables: Any) -> Iterator[Workload]:
    """The last slot of a page of each request, and what follows from it."""
    width, everyone = size.kv_heads * size.head_width, np.arange(size.requests)
    ends = np.full(size.requests, size.context // size.page_size * size.page_size - 1)
    pages = _step(device, tables, everyone, ends, size.page_size)
    places, grids = _slots(tables, everyone, ends, size.page_size), tables[everyone, ends // size.page_size]
    rows = tables.size * size.page_size
    cells = _cells([device.empty((rows, width), wp.uint8), *(device.empty((tables.size, width)) for _ in range(2)),
                    device.empty((rows, width), wp.int8), device.empty((rows, size.kv_heads))],
                   device.put(draw(rng, size.requests * size.page_size, width)), device.put(everyone, wp.int32))
    k, v = draw(rng, size.requests, width), draw(rng, size.requests, width)
    a, b = device.put(k), device.put(v)
    case, own = f"int8, {size.requests} x {width}", everyone * size.page_size + size.page_size - 1

    def by_head() -> Any:
        codes, scales = encode_values(v.reshape(size.requests, size.kv_heads, -1))
        return np.concatenate([k, codes.reshape(k.shape), 127 * scales], axis=1).astype(float)

    yield Workload("write_int8", case,
                   lambda: device.blocks(int8.write_int8, (size.requests, size.kv_heads), pages, a, b, cells,
                                         size.head_width),
                   lambda: np.concatenate([cells.tails.numpy()[own], cells.value_codes.numpy()[places],
                                           127 * cells.value_scales.numpy()[places]], axis=1),
                   by_head, None, (8 + 5) * k.size + 4 * size.requests * size.kv_heads, 4 * k.size)
    full = device.put(everyone, wp.int32)
    slots = (grids[:, None] * size.page_size + np.arange(size.page_size)).reshape(-1)

    def by_channel() -> Any:
        tails = cells.tails.numpy().reshape(size.requests, size.page_size, width).swapaxes(1, 2)
        codes, low, scale = encode_keys(tails)
        return np.concatenate([codes.swapaxes(1, 2).reshape(-1, width), low, 255 * scale]).astype(float)

    yield Workload("encode_keys", f"{case}, pages of {size.page_size}",
                   lambda: device.threads(int8.encode_keys, (size.requests, width), pages, full, cells),
                   lambda: np.concatenate([cells.key_codes.numpy()[slots], cells.key_lows.numpy()[grids],
                                           255 * cells.key_scales.numpy()[grids]]),
                   by_channel, by_channel, (5 * size.page_size + 8) * k.size, 6 * size.page_size * k.size)


def _cells(arrays: list[Any], tails: Any, own: Any) -> Any:
    cells = int8.Int8Pages()
    names = ("key_codes", "key_lows", "key_scales", "value_codes", "value_scales", "tails", "own")
    for name, numbers in zip(names, (*arrays, tails, own)):
        setattr(cells, name, numbers)
    return cells


def _attention(device: Device, size: Size, rng: Any, tables: Any, name: tuple[str, str], launch: Any, keys: Any,
               values: Any, nbytes: Callable[[Any, Any], int], per_number: int) -> Iterator[Workload]:
    """Of every request's last token, and of a chunk at the end of one request."""
    width = size.kv_heads * size.head_width
    chunk = np.arange(size.context - size.chunk, size.context)
    for phase, spans, positions in (
            ("decode", np.arange(size.requests), np.full(size.requests, size.context - 1)),
            ("chunk", np.zeros_like(chunk), chunk)):
        q, heads = draw(rng, len(spans), width * size.group), size.kv_heads * size.group
        out = device.empty(q.shape)
        run = launch(_step(device, tables, spans, positions, size.page_size), device.put(q), out, (len(q), heads),
                     spans, positions)

        def attention(number: Any, q: Any = q, spans: Any = spans, positions: Any = positions) -> Any:
            found = []
            for one in np.unique(spans):
                slots = _slots(tables, one, np.arange(size.context), size.page_size)
                mine_k, mine_v = (numbers[slots].astype(number) for numbers in (keys, values))
                found.append(_attend(q[spans == one].astype(number), mine_k, mine_v, positions[spans == one], size))
            return np.concatenate(found)

        yield Workload(name[0], f"{phase}, {name[1]}, {len(q)} x {heads} heads of {size.head_width}, "
                                f"{size.context} positions", run, out.numpy, partial(attention, np.float64),
                       partial(attention, np.float32), nbytes(spans, positions) + 8 * q.size,
                       per_number * int((positions + 1).sum()) * q.shape[1])


def _tables(size: Size, rng: Any) -> Any:
    """Block tables, the pages in any order."""
    pages_each = -(-size.context // size.page_size)
    return rng.permutation(size.requests * pages_each).reshape(size.requests, pages_each).astype(np.int32)


def _slots(tables: Any, spans: Any, positions: Any, page_size: int) -> Any:
    return tables[spans, positions // page_size] * page_size + positions % page_size


def _step(device: Device, tables: Any, spans: Any, positions: Any, page_size: int) -> Any:
    pages = kernels.Pages()
    pages.tables, pages.spans, pages.positions = (device.put(numbers, wp.int32)
                                                  for numbers in (tables, spans, positions))
    pages.page_size, pages.layers, pages.layer = page_size, 1, 0
    return pages


def _attend(q: Any, keys: Any, values: Any, positions: Any, size: Size) -> Any:
    """Causal attention: q [t, heads * d] at these positions, keys and values [n, kv_heads * d]."""
    d, mixed = size.head_width, []
    for head in range(size.kv_heads * size.group):
        shared = head // size.group * d
        scores = q[:, head * d:(head + 1) * d] @ keys[:, shared:shared + d].T / np.sqrt(q.dtype.type(d))
        scores[np.arange(len(keys)) > positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed.append(weights @ values[:, shared:shared + d] / weights.sum(axis=1, keepdims=True))
    return np.concatenate(mixed, axis=1)
