"""Optional · Weight matrices on a device, as floats or as packed int8 or int4 codes (extra ``cuda``).

    matrix.times(x)      x @ matrix.T: [T, D] -> [T, R]
    matrix.pick(rows)    some rows as floats: [T] -> [T, D]

One row of x, as in the decode of a single request, has a kernel of its own; from two rows on, eight rows share every
weight that is read.

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import warp as wp

from starter.backends.cuda import kernels
from starter.backends.cuda.device import NUMBERS, Array, Device
from starter.base.weights import Tensor
from starter.errors import BackendError
from starter.quantization import QuantizedTensor
from starter.schema import QuantizationConfig


class DeviceFloatMatrix:
    """[R, D] of float32 or float16."""

    def __init__(self, device: Device, tensor: Tensor, dtype: str) -> None:
        self.device, self.shape, self.dtype = device, tensor.shape, NUMBERS[dtype]
        with np.errstate(over="ignore"):
            numbers = np.asarray(tensor.values, dtype=np.float32).reshape(tensor.shape).astype(dtype)
        if not np.isfinite(numbers).all():
            raise BackendError(f"a weight is beyond the largest number of {dtype}; take dtype='float32'")
        self.weights = device.put(numbers, self.dtype)

    @property
    def nbytes(self) -> int:
        return int(self.weights.capacity)

    def times(self, x: Array) -> Array:
        one, eight = (kernels.forms[kernel, self.dtype] for kernel in (kernels.times_floats, kernels.times_floats_8))
        return _product(self.device, one, eight, self.weights, x, self.shape[0])

    def pick(self, rows: Array) -> Array:
        out = self.device.empty((len(rows), self.shape[1]))
        self.device.threads(kernels.forms[kernels.gather, self.dtype], out.shape, self.weights, rows, out)
        return out


class DeviceCodeMatrix:
    """A ``QuantizedTensor`` in the words of ``kernels.Codes``. There all codes count from 0: a symmetric one is moved
    up by half the number of codes, which becomes its zero point. One number in memory serves all groups."""

    def __init__(self, device: Device, tensor: QuantizedTensor) -> None:
        if tensor.scales.typecode != "f":
            raise BackendError("a matrix with numbers this large, small or far from zero has scales of 64 bits, and "
                               "backend 'cuda' computes with 32; take backend 'numpy', or no quantization")
        self.device, self.shape = device, tensor.shape
        rows, columns = tensor.shape
        groups, size = tensor.groups_per_row, min(tensor.group_size or columns, columns)
        m = kernels.Codes()
        m.columns, m.group_size = columns, size
        m.word_codes = 32 // tensor.bits
        m.group_words = -(-size // m.word_codes)
        m.bits, m.mask = tensor.bits, 2 ** tensor.bits - 1
        words = _words(tensor, groups, size, m.group_words * m.word_codes)
        zeros = np.asarray([_half(tensor)] if tensor.symmetric else tensor.zero_points, np.float32)
        m.words = device.put(words, wp.uint32)
        m.scales = device.put(np.asarray(tensor.scales, np.float32).reshape(rows, groups))
        self._zeros = device.put(zeros)
        m.zeros = wp.array(ptr=self._zeros.ptr, shape=(rows, groups), dtype=wp.float32, device=device.wp,
                           strides=(0, 0) if tensor.symmetric else (4 * groups, 4))
        self.codes = m

    @property
    def nbytes(self) -> int:
        return int(self.codes.words.capacity + self.codes.scales.capacity + self._zeros.capacity)

    def times(self, x: Array) -> Array:
        return _product(self.device, kernels.times_codes, kernels.times_codes_8, self.codes, x, self.shape[0])

    def pick(self, rows: Array) -> Array:
        out = self.device.empty((len(rows), self.shape[1]))
        self.device.threads(kernels.gather_codes, (len(rows), self.codes.words.shape[1]), self.codes, rows, out)
        return out


def bytes_of(tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None, dtype: str) -> int:
    """Bytes that the matrix will take on the device."""
    rows, columns = tensor.shape
    form = tensor if isinstance(tensor, QuantizedTensor) else quantization
    if form is None:
        return rows * columns * int(wp.types.type_size_in_bytes(NUMBERS[dtype]))
    size = min(form.group_size or columns, columns)
    groups, words = -(-columns // size), -(-size * form.bits // 32)
    return rows * groups * (4 * words + 4) + (4 if form.symmetric else 4 * rows * groups)


def _product(device: Device, one: Any, eight: Any, weights: Any, x: Array, rows: int) -> Array:
    """x @ weights.T by the kernel for one row or by the one for eight."""
    out = device.empty((x.shape[0], rows))
    if x.shape[0] == 1:
        device.blocks(one, (rows, 1), weights, x, out)
    else:
        device.blocks(eight, (rows, -(-x.shape[0] // kernels.ROWS)), weights, x, out)
    return out


def _half(tensor: QuantizedTensor) -> int:
    """Half the number of codes."""
    return 1 << (tensor.bits - 1)


def _words(tensor: QuantizedTensor, groups: int, size: int, padded_size: int) -> Any:
    """The packed codes as uint32 [R, words], every group of ``size`` codes padded to whole words."""
    rows, columns = tensor.shape
    codes: Any = np.frombuffer(tensor.packed, dtype=np.uint8).reshape(rows, -1)
    if tensor.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=2).reshape(rows, -1)[:, :columns]
    if tensor.symmetric:
        codes = codes ^ _half(tensor)  # -8 .. 7 in two's complement -> 0 .. 15, likewise for int8
    full = np.zeros((rows, groups * size), np.uint8)
    full[:, :columns] = codes
    padded = np.zeros((rows, groups, padded_size), np.uint8)
    padded[:, :, :size] = full.reshape(rows, groups, size)
    numbers: Any = padded.reshape(rows, -1)
    if tensor.bits == 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return numbers.view("<u4").astype(np.uint32)  # the first code in the lowest bits
