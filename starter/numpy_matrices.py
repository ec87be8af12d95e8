"""Optional · A quantized matrix that stays packed in memory: a tile of it at a time becomes floats (extra ``numpy``).

    codes [columns, rows]                    room [columns, some rows]
    +------+------+------+------+            +------+
    | int8 | int8 | int8 | int8 |   ------>  | float|   x @ room -> some columns of the result
    +------+------+------+------+            +------+
             this tile                       the next tile takes its place, so it stays in the cache

NumPy multiplies floats, so every product turns every code into a float again. What this saves is memory, not time: the
product of a single row takes several times as long as with float weights. The rows of a batch share a tile, so the
larger the batch, the smaller the loss.

The numbers are those of ``quantization.dequantize``. As there in ``matvec``, a zero point leaves the sum,

    sum(scale * (code - zero) * x)  =  sum(scale * code * x)  -  scale * zero * sum(x)

so that codes are multiplied by their scale and nothing else. int4 codes are kept as 0 .. 15 in any case (a symmetric
one is moved up by 8, which is its zero point then), two a byte: column c in the low nibble, column c + half in the
high one, because two halves unpack faster than neighbours.
"""

from __future__ import annotations

from threading import local
from typing import Any, Union

import numpy as np

from .quantization import QuantizedTensor

Array = Any  # numpy.ndarray
Rows = Union[slice, Array]

TILE = 128 * 1024  # numbers in a tile: half a megabyte of float32
_rooms = local()  # of each thread: where its tile is made; a new array for each would cost page faults


class PackedMatrix:
    """A ``QuantizedTensor``, transposed, as arrays. Computes in float32, or where the scales need it in float64."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.shape, self.bits = tensor.shape, tensor.bits
        self.group_size = tensor.group_size or tensor.shape[1]
        rows, columns = tensor.shape
        codes = np.frombuffer(tensor.packed, dtype=np.uint8).reshape(rows, -1).T
        if tensor.bits == 4:
            codes = _halves(codes, columns, flip=8 if tensor.symmetric else 0)
        elif tensor.symmetric:
            codes = codes.view(np.int8)
        self.codes = np.ascontiguousarray(codes)
        self.scales = np.ascontiguousarray(np.array(tensor.scales).reshape(rows, -1).T)  # [groups, rows]
        self.zero_points = None  # where all are 0
        if not tensor.symmetric:
            self.zero_points = np.ascontiguousarray(np.array(tensor.zero_points).reshape(rows, -1).T)
        elif tensor.bits == 4:
            self.zero_points = np.array([[8]], dtype=np.int16)

    @property
    def nbytes(self) -> int:
        """Of codes, scales and zero points."""
        return sum(array.nbytes for array in (self.codes, self.scales, self.zero_points) if array is not None)

    def times(self, x: Array) -> Array:
        """x [T, columns] times the transposed matrix -> float32 [T, rows]."""
        rows, columns = self.shape
        step = max(1, TILE // columns)
        out = np.empty((len(x), rows), dtype=np.float32)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            out[:, part] = x @ self._scaled(part)
        if self.zero_points is not None:
            sums = np.add.reduceat(x, range(0, columns, self.group_size), axis=1)   # [T, groups]
            out -= sums @ (self.scales * self.zero_points)
        return out

    def rows(self, index: Rows) -> Array:
        """Some rows, dequantized: float32 [rows, columns]."""
        numbers = self._scaled(index)
        if self.zero_points is not None:
            zero_points = np.broadcast_to(self.zero_points, self.scales.shape)
            numbers -= self._of_columns(self.scales[:, index] * zero_points[:, index])
        return np.array(numbers.T, dtype=np.float32, order="C")

    def _scaled(self, index: Rows) -> Array:
        """scale * code of some rows, [columns, rows], until this thread's next call."""
        codes, scales = self.codes[:, index], self.scales[:, index]
        numbers = _room((self.shape[1], scales.shape[1]), scales.dtype)
        if self.bits == 4:
            half = len(codes)
            np.copyto(numbers[:half], codes & 15)
            np.copyto(numbers[half:], codes[:self.shape[1] - half] >> 4)
        else:
            np.copyto(numbers, codes)
        numbers *= self._of_columns(scales)
        return numbers

    def _of_columns(self, numbers: Array) -> Array:
        """One number for each group -> one for each column."""
        return numbers.repeat(self.group_size, axis=0)[:self.shape[1]] if len(numbers) > 1 else numbers


def _halves(packed: Array, columns: int, flip: int) -> Array:
    """Nibbles of neighbouring columns [bytes, rows] -> of the two halves; ``flip`` 8 turns -8 .. 7 into 0 .. 15."""
    nibbles = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1, packed.shape[1])[:columns] ^ flip
    half = (columns + 1) // 2
    low, high = nibbles[:half], np.zeros_like(nibbles[:half])
    high[:columns - half] = nibbles[half:]
    return low | high << 4


def _room(shape: tuple[int, int], dtype: Any) -> Array:
    """Reused memory for a tile."""
    size = shape[0] * shape[1] * dtype.itemsize
    if len(getattr(_rooms, "memory", b"")) < size:
        _rooms.memory = np.empty(size, dtype=np.uint8)
    return _rooms.memory[:size].view(dtype).reshape(shape)
