"""Optional · A quantized matrix that stays packed in memory: a tile of it at a time becomes floats (extra ``numpy``).

    codes [rows, columns]               room [some rows, columns]
    +------+------+------+------+       +------+------+------+------+
    | int8 | int8 | int8 | int8 |  -->  | float| float| float| float|   x @ room.T -> some columns of the result
    +------+------+------+------+       +------+------+------+------+
    |  the next tile ...        |       the next tile takes its place, so it stays in the cache

NumPy multiplies floats, so every product turns every code into a float again. A group's scale and zero point are the
same for all its codes, so they can be taken out of the sum (as in ``quantization.matvec``),

    sum(scale * (code - zero) * x)  =  scale * (sum(code * x) - zero * sum(x))

and the codes become floats without being multiplied by anything: one product for each group, then one scale for each
product. With many rows of x those products are more numbers than the codes, so then the codes of the tile are scaled.

This saves memory, not time: a product of one row takes about twice as long as with float weights (with int4 a little
more than with int8). The rows of a batch share a tile, so the loss shrinks as the batch grows.
``scripts/bench.py --suite ladder`` measures it in whole runs.

int4 codes are kept as 0 .. 15 (a symmetric one is moved up by 8, which is its zero point then), two a byte: column c in
the low nibble, column c + half in the high one, because two halves unpack faster than neighbours.
"""

from __future__ import annotations

from threading import local
from typing import Any, Union

import numpy as np

from starter.quantization import QuantizedTensor

Array = Any  # numpy.ndarray
RowIndex = Union[slice, Array]

TILE = 128 * 1024  # numbers in a tile: half a megabyte of float32
FEW = 40  # rows of x up to which a product for each group is faster
_rooms = local()  # of each thread: memory for its tile; a new array for each tile would cost page faults


class PackedMatrix:
    """A ``QuantizedTensor`` as arrays. Computes in float32, or in float64 if the scales need it."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.shape, self.bits = tensor.shape, tensor.bits
        rows, columns = tensor.shape
        self.groups, self.group_size = tensor.groups_per_row, min(tensor.group_size or columns, columns)
        codes = np.frombuffer(bytes(tensor.packed), dtype=np.uint8).reshape(rows, -1)
        if tensor.bits == 4:
            codes = _halves(codes, columns, flip=8 if tensor.symmetric else 0)
        elif tensor.symmetric:
            codes = codes.view(np.int8)
        self.codes = codes                                                              # [rows, bytes]
        self.scales = np.array(tensor.scales).reshape(rows, -1).T.copy()                # [groups, rows]
        self.zero_points = None  # where all are 0
        if not tensor.symmetric:
            self.zero_points = np.array(tensor.zero_points).reshape(rows, -1).T.copy()
        elif tensor.bits == 4:
            self.zero_points = np.array([[8]], dtype=np.int16)
        self._forget_grids_of_zeros()

    def _forget_grids_of_zeros(self) -> None:
        """Give a group of zeros the scale 0: its own may be large, and then the rounding error of
        sum(code * x) - zero * sum(x) would be added to the sums of the others."""
        if self.zero_points is None:
            return
        rows, columns = self.shape
        zeros = np.broadcast_to(self.zero_points, self.scales.shape)
        for part in _tiles(rows, columns):
            differs = self._floats(self.codes[part]) != zeros[:, part].T[:, :, None]
            differs.reshape(len(differs), -1)[:, columns:] = False  # beyond the last column
            self.scales[:, part] *= differs.any(axis=2).T

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(array.nbytes for array in (self.codes, self.scales, self.zero_points) if array is not None)

    def times(self, x: Array) -> Array:
        """x [T, columns] times the transposed matrix -> float32 [T, rows]."""
        rows, columns = self.shape
        by_group = self._by_group(x)
        multiply = self._grouped if len(x) <= FEW or self.groups == 1 else self._scaled
        out = np.empty((len(x), rows), dtype=np.float32)
        for part in _tiles(rows, columns):
            out[:, part] = multiply(part, by_group)
        if self.zero_points is not None:
            out -= by_group.sum(axis=1).T @ (self.scales * self.zero_points)
        return out

    def rows(self, index: RowIndex) -> Array:
        """Some rows, dequantized: float32 [rows, columns]."""
        numbers = self._floats(self.codes[index])                                       # [rows, groups, group size]
        if self.zero_points is not None:
            numbers -= np.broadcast_to(self.zero_points, self.scales.shape)[:, index].T[:, :, None]
        numbers *= self.scales[:, index].T[:, :, None]
        return numbers.reshape(len(numbers), -1)[:, :self.shape[1]].astype(np.float32)

    def _by_group(self, x: Array) -> Array:
        """[T, columns] -> [groups, group size, T], zeros where the last group is shorter."""
        padded = np.zeros((len(x), self.groups * self.group_size), dtype=self.scales.dtype)
        padded[:, :self.shape[1]] = x
        return padded.reshape(len(x), self.groups, -1).transpose(1, 2, 0).copy()

    def _grouped(self, part: slice, x: Array) -> Array:
        """Products of the codes for each group, then scaled: [T, some rows]."""
        products = np.matmul(self._floats(self.codes[part]).transpose(1, 0, 2), x)      # [groups, some rows, T]
        products *= self.scales[:, part, None]
        return products.sum(axis=0).T

    def _scaled(self, part: slice, x: Array) -> Array:
        """The same with scaled codes and one product."""
        numbers = self._floats(self.codes[part])
        numbers *= self.scales[:, part].T[:, :, None]
        return (numbers.reshape(len(numbers), -1) @ x.reshape(-1, x.shape[2])).T

    def _floats(self, codes: Array) -> Array:
        """Some rows of codes as floats [rows, groups, group size], zeros where the last group is shorter. They lie in
        the room, until this thread's next call."""
        columns, width = self.shape[1], self.groups * self.group_size
        half = codes.shape[1]
        room = _room((len(codes), max(width, 2 * half if self.bits == 4 else 0)), self.scales.dtype)
        if self.bits == 4:
            np.copyto(room[:, :half], codes & 15)
            np.copyto(room[:, half:2 * half], codes >> 4)
        else:
            np.copyto(room[:, :columns], codes)
        room[:, columns:] = 0.0
        return room[:, :width].reshape(len(codes), self.groups, self.group_size)


def _tiles(rows: int, columns: int) -> list[slice]:
    """The rows of each tile."""
    step = max(1, TILE // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _halves(packed: Array, columns: int, flip: int) -> Array:
    """Nibbles of neighbouring columns [rows, bytes] -> of the two halves; ``flip`` 8 turns -8 .. 7 into 0 .. 15."""
    nibbles = np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)[:, :columns] ^ flip
    half = (columns + 1) // 2
    low, high = nibbles[:, :half], np.zeros((len(packed), half), dtype=np.uint8)
    high[:, :columns - half] = nibbles[:, half:]
    return low | high << 4


def _room(shape: tuple[int, int], dtype: Any) -> Array:
    """Reused memory for a tile."""
    size = shape[0] * shape[1] * dtype.itemsize
    if len(getattr(_rooms, "memory", b"")) < size:
        _rooms.memory = np.empty(size, dtype=np.uint8)
    return _rooms.memory[:size].view(dtype).reshape(shape)
