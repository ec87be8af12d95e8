"""Every kernel at a size at which its speed can be seen.

    for work in workloads(device, Size()):
        work.launch()         and what else a ``workload.Workload`` can do
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import warp as wp

from scripts.gpu.page_workloads import float_pages, int8_pages
from scripts.gpu.workload import Size, Workload, draw
from starter.backends.cuda import kernels
from starter.backends.cuda.device import NUMBERS, Device
from starter.backends.cuda.matrices import DeviceCodeMatrix
from starter.quantization import QuantizedTensor

GROUP = 32


def workloads(device: Device, size: Size) -> Iterator[Workload]:
    """One after the other, as each may take much memory: Warp's own copy, to compare with, and all kernels."""
    rng = np.random.default_rng(219)
    yield from _element_by_element(device, size, rng)
    yield from _turns(device, size, rng)
    yield from _rows(device, size, rng)
    for dtype in NUMBERS:
        yield from _floats(device, size, rng, dtype)
    for bits in (8, 4):
        yield from _codes(device, size, rng, bits)
    for dtype in NUMBERS:
        yield from float_pages(device, size, rng, dtype)
    yield from int8_pages(device, size, rng)


def _element_by_element(device: Device, size: Size, rng: Any) -> Iterator[Workload]:
    x, y, bias = draw(rng, size.tokens, size.columns), draw(rng, size.tokens, size.columns), draw(rng, size.columns)
    a, b, c, out = device.put(x), device.put(y), device.put(bias), device.empty(x.shape)
    case = f"{size.tokens} x {size.columns}"
    yield Workload("copy", case, lambda: wp.copy(out, a), out.numpy, lambda: x.astype(float), x.copy, 8 * x.size, 0)
    yield Workload("add", case, lambda: device.threads(kernels.add, x.shape, a, b, out), out.numpy,
                   lambda: x.astype(float) + y, lambda: x + y, 12 * x.size, x.size)
    yield Workload("swiglu", case, lambda: device.threads(kernels.swiglu, x.shape, a, b, out), out.numpy,
                   lambda: x / (1 + np.exp(-x.astype(float))) * y, lambda: x / (1 + np.exp(-x)) * y, 12 * x.size,
                   4 * x.size)
    yield Workload("add_bias", case, lambda: device.threads(kernels.add_bias, x.shape, out, c), out.numpy,
                   lambda: x.astype(float) + bias, lambda: x + bias, 8 * x.size, x.size, lambda: wp.copy(out, a))


def _turns(device: Device, size: Size, rng: Any) -> Iterator[Workload]:
    pairs = size.head_width // 2
    positions = rng.integers(0, 131_072, size.tokens).astype(np.int32)
    frequencies = 10_000.0 ** -(np.arange(pairs) / pairs)
    angles = np.outer(positions, frequencies)
    sent, turning = device.put(positions, wp.int32), device.put(frequencies, wp.float64)
    turned = device.empty(angles.shape, wp.vec2)
    yield Workload("turns", f"{size.tokens} x {pairs}",
                   lambda: device.threads(kernels.turns, angles.shape, sent, turning, turned), turned.numpy,
                   lambda: np.stack((np.cos(angles), np.sin(angles)), axis=2),
                   lambda: (np.cos(angles), np.sin(angles)), 4 * angles.size, 2 * angles.size)
    x = draw(rng, size.tokens, size.kv_heads * size.group * size.head_width)
    a, out = device.put(x), device.empty(x.shape)
    turn = np.tile(np.exp(1j * angles), size.kv_heads * size.group)
    single = turn.astype(np.complex64)

    def wanted() -> Any:
        mixed = (x[:, 0::2].astype(float) + 1j * x[:, 1::2]) * turn
        return np.stack((mixed.real, mixed.imag), axis=2).reshape(x.shape)

    yield Workload("rotate", f"{x.shape[0]} x {x.shape[1]}",
                   lambda: device.threads(kernels.rotate, (x.shape[0], x.shape[1] // 2), a, turned, out), out.numpy,
                   wanted, lambda: x.view(np.complex64) * single, 8 * x.size, 3 * x.size)


def _rows(device: Device, size: Size, rng: Any) -> Iterator[Workload]:
    x, gain = draw(rng, size.tokens, size.columns), draw(rng, size.columns)
    a, b, out = device.put(x), device.put(gain), device.empty(x.shape)

    def norm(x: Any) -> Any:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * gain

    yield Workload("norm", f"{size.tokens} x {size.columns}",
                   lambda: device.blocks(kernels.norm, (size.tokens, 1), a, b, 1e-5, out), out.numpy,
                   lambda: norm(x.astype(float)), lambda: norm(x), 8 * x.size, 4 * x.size)
    logits = 4 * draw(rng, size.batch, size.vocabulary)
    sent, best = device.put(logits), device.empty((size.batch,), wp.vec2d)
    first = logits.argmax(axis=1)

    def logprobs(x: Any) -> Any:
        return -np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1))

    def fetch() -> Any:  # [is it the right token, its log-probability]
        found = best.numpy()
        return np.stack((found[:, 0] == first, found[:, 1]), axis=1)

    yield Workload("best_tokens", f"{size.batch} x {size.vocabulary}",
                   lambda: device.blocks(kernels.best_tokens, best.shape, sent, best), fetch,
                   lambda: np.stack((np.ones(size.batch), logprobs(logits.astype(float))), axis=1),
                   lambda: (logits.argmax(axis=1), logprobs(logits)), 4 * logits.size, 3 * logits.size)


def _floats(device: Device, size: Size, rng: Any, dtype: str) -> Iterator[Workload]:
    weights = draw(rng, size.rows, size.columns).astype(dtype)
    matrix = device.put(weights, NUMBERS[dtype])
    rows = rng.integers(0, size.rows, size.batch).astype(np.int32)
    chosen, out = device.put(rows, wp.int32), device.empty((size.batch, size.columns))
    picked = size.batch * size.columns
    yield Workload("gather", f"{dtype}, {size.batch} of {size.rows} x {size.columns}",
                   lambda: device.threads(kernels.gather, out.shape, matrix, chosen, out), out.numpy,
                   lambda: weights[rows].astype(float), lambda: weights[rows].astype(np.float32),
                   (4 + weights.itemsize) * picked, 0)
    yield from _products(device, size, rng, dtype, (kernels.times_floats, kernels.times_floats_8), matrix,
                         lambda first, last: weights[first:last], weights.nbytes, 0)


def _codes(device: Device, size: Size, rng: Any, bits: int) -> Iterator[Workload]:
    """Symmetric codes in groups of 32, drawn as codes."""
    groups, half = -(-size.columns // GROUP), 1 << (bits - 1)
    codes = rng.integers(1 - half, half, (size.rows, size.columns), dtype=np.int8)
    scales = rng.random((size.rows, groups), dtype=np.float32) + np.float32(0.5)
    packed = codes.view(np.uint8) if bits == 8 else _nibbles(codes.view(np.uint8) & 15)
    tensor = QuantizedTensor(codes.shape, bits, GROUP, True, array("f", scales.tobytes()), array("h"), packed.tobytes())
    matrix = DeviceCodeMatrix(device, tensor)

    def dequantized(first: int, last: int) -> Any:
        return codes[first:last] * np.repeat(scales[first:last], GROUP, axis=1)[:, :size.columns]

    rows = rng.integers(0, size.rows, size.batch).astype(np.int32)
    chosen, out = device.put(rows, wp.int32), device.empty((size.batch, size.columns))
    yield Workload("gather_codes", f"int{bits}, {size.batch} of {size.rows} x {size.columns}",
                   lambda: device.threads(kernels.gather_codes, (size.batch, matrix.codes.words.shape[1]), matrix.codes,
                                          chosen, out), out.numpy,
                   lambda: np.concatenate([dequantized(row, row + 1) for row in rows]), None,
                   size.batch * (4 * size.columns + size.columns * bits // 8 + 8 * groups),
                   2 * size.batch * size.columns)
    yield from _products(device, size, rng, f"int{bits}", (kernels.times_codes, kernels.times_codes_8), matrix.codes,
                         dequantized, size.rows * (size.columns * bits // 8 + 4 * groups), size.rows * size.columns)


def _nibbles(codes: Any) -> Any:
    """Two codes a byte, the low one first; the last of an odd row with 0."""
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return even[:, 0::2] | even[:, 1::2] << 4


def _products(device: Device, size: Size, rng: Any, form: str, both: tuple[Any, Any], matrix: Any,
              part: Callable[[int, int], Any], matrix_bytes: int, unpacking: int) -> Iterator[Workload]:
    """One row of x, and a batch of them. ``part(first, last)``: some rows of the matrix as floats."""
    whole = part(0, size.rows).astype(np.float32)
    for kernel, batch in zip(both, (1, size.batch)):
        x, eights = draw(rng, batch, size.columns), -(-batch // kernels.ROWS)
        a, out = device.put(x), device.empty((batch, size.rows))

        def wanted(x: Any = x) -> Any:
            steps = range(0, size.rows, 1_024)
            return np.concatenate([x.astype(float) @ part(i, i + 1_024).astype(float).T for i in steps], axis=1)

        def launch(kernel: Any = kernel, eights: int = eights, a: Any = a, out: Any = out) -> None:
            device.blocks(kernel, (size.rows, eights), matrix, a, out)

        def numpy(x: Any = x) -> Any:
            return x @ whole.T

        products = size.rows * size.columns * batch
        yield Workload(kernel.key.rpartition(".")[2], f"{form}, {batch} x {size.columns} by {size.rows}", launch,
                       out.numpy, wanted, numpy, matrix_bytes + 4 * batch * (size.columns + size.rows),
                       2 * products + unpacking * (eights if batch > 1 else 1))
