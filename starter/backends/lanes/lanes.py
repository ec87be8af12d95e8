"""M1 · Matrix times vector inside big integers: hundreds of small products for the price of one.

CPython multiplies a long integer by a short one in a tight C loop. So one long integer holds a whole *column* of the
matrix: its bits are divided into *lanes* of 32 bits, with one weight in each. The product W x is one sum over columns:

        row 0 [ 2 -1]                    column 0 =  2 + 3 * 2**32 - 4 * 2**64
    W = row 1 [ 3  5]     x = [10 7]     column 1 = -1 + 5 * 2**32 + 6 * 2**64
        row 2 [-4  6]
                              lane 2          lane 1          lane 0
    10 * column 0 =      |     -40      |      30      |       20     |
     7 * column 1 =      |      42      |      35      |       -7     |
              sum =      |       2      |      65      |       13     |  = W x, row by row

Why no lane overflows into its neighbour. The sum is the integer  acc_0 + acc_1 * 2**32 + acc_2 * 2**64 + ...  with
acc_r = W_r . x, whatever the partial sums were; the lanes can be separated again if every |acc_r| < 2**31. By
Cauchy-Schwarz |W_r . x| <= |W_r| |x|, so x is scaled to integers of length |x| <= (2**31 - 1) / max_r |W_r|. That fills
the lane and cannot overflow it, without a search for the largest product. (acc_r is an integer, so the rounding of this
bound in doubles, below a thousandth, cannot carry it to 2**31.) It leaves about 11 bits for each number of x at 288
columns and 14-bit weights, 8 bits at 4,096.

Weights become integers too, row by row: 14 bits and a scale for float weights (an error of 1e-4 of the row's size), or
the codes of a quantized row as they are: int8 in lanes of 24 bits, int4 in 16, which cost proportionally less.

Memory: 4.3, 3.2 and 2.1 bytes a weight. Time: ``python3 scripts/bench.py --suite stdlib`` measures it beside a loop.

Read for this: Lamport 1975, "Multiple byte processing with full-word instructions" (lanes in one word). Taken: the
idea of lanes. Changed: the word is an integer of any length, the lanes are signed, and the bound is Cauchy-Schwarz.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice, repeat
from math import frexp, hypot, isfinite, nan, sqrt
from operator import mul
from struct import Struct

from starter.quantization import QuantizedTensor

WEIGHT_BITS = 14  # of a float weight in a lane
BLOCK_ROWS = 2048  # most lanes in one integer: longer ones do not fit in the processor's first cache
KEPT_ROWS = 1024  # that ``row`` remembers
LEAST = 8  # root mean square that the integers of x must have room for: with less they would be mostly rounding error
_MAGIC = 1.5 * 2.0**52  # doubles from 2**52 to 2**53 are whole numbers, so adding this to a number rounds it
UNITS = {32: 1.0, 24: 2.0**-8, 16: 1.0}  # the unit of ``unpack``'s numbers: those of 24 bits come 2**8 times as large


def to_integers(x: Sequence[float], factor: float) -> list[int]:
    """round(v * factor) for each v, as long as |v * factor| < 2**31.

    ``_MAGIC`` ends in 32 zero bits, so the low half of ``_MAGIC`` + n is n in two's complement: the integers are read
    out of the doubles in one pass, where round() would be called for each.
    """
    doubles = _doubles(len(x)).pack(*[v * factor + _MAGIC for v in x])
    return memoryview(doubles).cast("i")[::2].tolist()


def largest_exponent(length: float, reach: float) -> int:
    """The largest e (up to 1022) of length * 2**e < reach."""
    return min(-frexp(length / reach)[1], 1022)


@lru_cache(maxsize=1024)
def _doubles(count: int) -> Struct:
    return Struct(f"<{count}d")


@lru_cache(maxsize=512)
def ones(count: int, bits: int) -> int:
    """1 in each of ``count`` lanes."""
    return ((1 << bits * count) - 1) // ((1 << bits) - 1)


def pack(numbers: Iterable[int], bits: int) -> int:
    """Numbers of |n| < 2**(bits - 1) into lanes, the first one lowest: the sum of n_i * 2**(bits * i)."""
    wide = array("i", numbers)
    half = ones(len(wide), bits) << bits - 1
    return (int.from_bytes(_narrowed(wide.tobytes(), bits), "little") ^ half) - half


def unpack(total: int, count: int, bits: int) -> memoryview:
    """The inverse of ``pack``: ``count`` numbers, each of |n| < 2**(bits - 1), in multiples of ``UNITS[bits]``."""
    half = ones(count, bits) << bits - 1
    raw: bytes | bytearray = ((total + half) ^ half).to_bytes(count * bits // 8, "little")
    if bits == 24:  # no such number in memory: 3 bytes into the upper 3 of 4, where the sign is and all is times 2**8
        wide = bytearray(4 * count)
        for i in range(3):
            wide[i + 1::4] = raw[i::3]
        raw = wide
    return memoryview(raw).cast("h" if bits == 16 else "i")


def _narrowed(raw: bytes, bits: int) -> bytes | bytearray:
    """Numbers of 4 bytes -> their low bytes, as many as a lane has."""
    size = bits // 8
    if size == 4:
        return raw
    narrow = bytearray(len(raw) // 4 * size)
    for i in range(size):
        narrow[i::size] = raw[i::4]
    return narrow


def lane(total: int, index: int, bits: int) -> int:
    """One number out of packed ones. A negative lane borrows 1 from the lane above; rounding gives it back:

        lanes 5, -2, 3 (lane 0 last)       5 * 2**64 - 2 * 2**32 + 3
        shifted down by one lane           5 * 2**32 - 2              and a fraction of 3 / 2**32, rounded off
        shifted down by two lanes          5 - 2 / 2**32              floor 4, nearest 5
    """
    low = total if index == 0 else (total >> bits * index - 1) + 1 >> 1
    half = 1 << bits - 1
    return (low + half & (1 << bits) - 1) - half


class LaneMatrix:
    """A matrix [rows, columns] as integers times a scale for each row, its columns packed in lanes."""

    def __init__(self, rows: Iterable[Sequence[int]], scales: Sequence[float], bits: int) -> None:
        self.bits, self.scales = bits, scales
        self._blocks: list[tuple[int, list[int]]] = []  # (rows of the block, one integer for each column)
        longest, rows = 0.0, iter(rows)
        while block := list(islice(rows, BLOCK_ROWS)):
            longest = max(longest, *(hypot(*row) for row in block))
            self._blocks.append((len(block), [pack(column, bits) for column in zip(*block)]))
        self.shape = (len(scales), len(self._blocks[0][1]))
        # Rounding makes the integer vector at most sqrt(columns) / 2 longer than the scaled one.
        self._reach = (2.0 ** (bits - 1) - 1.0) / max(longest, 1.0) - 0.5 * sqrt(self.shape[1])
        self._scaled: dict[int, list[float]] = {}
        self._rows: dict[int, tuple[float, ...]] = {}  # an embedding table is asked for the same tokens again

    @classmethod
    def of_floats(cls, rows: Iterable[Sequence[float]]) -> LaneMatrix:
        """Each row on its own grid of 14-bit integers: |w - w'| <= max|row| / (2**14 - 2)."""
        most = 2 ** (WEIGHT_BITS - 1) - 1
        scales: list[float] = []

        def integers(row: Sequence[float]) -> list[int]:
            scales.append(max(max(row), -min(row)) / most or 1.0)
            return to_integers(row, 1.0 / scales[-1])

        return cls([integers(row) for row in rows], scales, 32)

    @classmethod
    def of_codes(cls, q: QuantizedTensor) -> LaneMatrix:
        """Codes with one scale a row and no zero point, as they are: int8 in lanes of 24 bits, int4 in 16. Of other
        formats the dequantized rows, at 14 bits."""
        rows = range(q.shape[0])
        if q.symmetric and q.groups_per_row == 1:
            lanes = cls(map(q.row_codes, rows), list(q.scales), 24 if q.bits == 8 else 16)
            if lanes._reach >= LEAST * sqrt(q.shape[1]):  # else the rows are too long for narrow lanes
                return lanes
        return cls.of_floats(map(q.row, rows))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed columns: 4 for each 30 bits."""
        return sum(len(columns) * (-(-count * self.bits // 30) * 4) for count, columns in self._blocks)

    def times(self, x: Sequence[float]) -> list[float]:
        """W x: [columns] -> [rows]. NaN or infinity anywhere in x makes every row NaN. O(rows * columns)."""
        length = hypot(*x)
        if not isfinite(length):
            return [nan] * self.shape[0]
        if length == 0.0:
            return [0.0] * self.shape[0]
        exponent = largest_exponent(length, self._reach)  # a power of two, so that scales can be kept ready
        integers = to_integers(x, 2.0**exponent)
        numbers: list[float] = []
        for count, columns in self._blocks:
            numbers += unpack(sum(map(mul, integers, columns)), count, self.bits)
        return list(map(mul, self._scales(exponent), numbers))

    def _scales(self, exponent: int) -> list[float]:
        """Row scales over 2**exponent. Few exponents ever occur: those of the usual lengths of x."""
        if exponent not in self._scaled:
            factor = UNITS[self.bits] * 2.0**-exponent
            self._scaled[exponent] = list(map(mul, self.scales, repeat(factor)))
        return self._scaled[exponent]

    def row(self, r: int) -> tuple[float, ...]:
        """Row r as floats: what ``times`` computes with."""
        if r not in self._rows:
            if len(self._rows) == KEPT_ROWS:
                self._rows.clear()
            scale, (_, columns) = self.scales[r], self._blocks[r // BLOCK_ROWS]
            self._rows[r] = tuple(scale * lane(column, r % BLOCK_ROWS, self.bits) for column in columns)
        return self._rows[r]
