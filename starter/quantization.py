"""M5 · Matrices of 8-bit or 4-bit integers: 0.28 or 0.16 of the float32 bytes, at a stated error.

A row is cut into groups of ``group_size`` numbers. Each group gets a grid of equally spaced points over its range,
and each of its numbers is replaced by the nearest point's integer, its *code*:

      low                                     high       the group's numbers lie in here
       [---------------------------------------]
     |     |     |     |  ...  |     |     |     |       grid points, multiples of ``scale``
     0     1     2     3      252   253   254   255      their codes (here asymmetric int8)

    dequantized = scale * (code - zero_point)                          the same formula for every format

    format            codes            scale                 zero_point
    symmetric int8    -127 .. 127      max|x| / 127          0, not stored
    symmetric int4      -7 .. 7        max|x| / 7            0, not stored
    asymmetric int8      0 .. 255      (high - low) / 255    -round(low / scale)
    asymmetric int4      0 .. 15       (high - low) / 15     -round(low / scale)

These are the scales of method "nearest"; "search" looks for better ones close by (``quantization.py``).

The zero point is an integer of any size, never clamped into the range of the codes: a group far from zero (weights
around 1e6 that differ by 1e-3) keeps its fine grid. -128 and -8 stay unused, so that -code is always a code.

Packed: row after row, each from a fresh byte. int8 is a byte a code; int4 two codes a byte, the low nibble first, and
the last high nibble of an odd row is 0. Symmetric codes are two's complement, asymmetric ones unsigned.

Scales are float32 and zero points int16, so int8 in groups of 32 takes 9 bits a number (9.5 asymmetric), int4 takes
5 (5.5), not float32's 32. A tensor with a group too large, too small or too far from zero for these stores all its
scales as float64 and all its zero points as int64. Grids from elsewhere need not have a point at 0: their zero points
are float32 between the integers (llama.cpp's Q4_1, ``checkpoints/gguf_blocks.py``), and nothing else changes.

    q = quantize([[0.5, -1.0, 2.0]], QuantizationConfig(bits=4, group_size=2))
    dequantize(q)                 # every number within half a step of its group; ``quantize`` states the bound
    matvec(q, [1.0, 2.0, 3.0])    # the product, straight from the packed codes

Sources: Jacob et al. 2018 (scale and zero point); Shen et al. 2020, "Q-BERT" (a scale for every group).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import fsum, inf, isfinite, sqrt
from numbers import Real
from operator import mul
from typing import Any, NamedTuple, Union

from .base.strict_json import Boolean, Integer, ListOf, Nullable, Number, OneOf, Shape, Text, describe
from .base.wings import picture, wing
from .errors import QuantizationError, SchemaError
from .schema import QuantizationConfig

# ---------------------------------------------------------------------------------------------------------------- grids

#: M5 · Choosing a group's grid: from the smallest number to the largest, or the one with the least squared error.
#:
#:     Grid(scale=0.5, first=-2, last=2):     -1.0    -0.5     0.0     0.5     1.0
#:                                              |       |       |       |       |
#:     numbers of the group                      x          x x   x       x           x
#:                                                                                 clipped to 1.0
#:
#: ``nearest`` lets the grid end at the group's smallest and largest number: no number is clipped, but one outlier makes
#: all steps wide. ``search`` narrows and widens the grid a little, tries where to cut, and keeps what has the least
#: squared error, a sum over the columns weighted by their *importance* where it is given:
#:
#:     error(grid)  =  sum over the group of  importance[c] * (x - nearest grid point)**2
#:
#: With importance[c] the mean square of what the column is multiplied with (``calibration/importance.py``) this is the expected
#: squared error of the layer's output, where the products of two columns' inputs average to 0.
#:
#: Sources, and what was taken: Frantar et al. 2022, "GPTQ" (the error that counts is the output's: the squared error under
#: the Hessian 2 X X^T of the inputs; taken: its diagonal, not the compensation between columns). Lin et al. 2023, "AWQ"
#: (the columns with large activations matter most, and a small grid search finds a good trade; taken: both, but as
#: weights of the error, not by scaling the columns). Dettmers et al. 2022, "LLM.int8()" (a few input features are
#: outliers: why one column may count hundreds of times as much as another). llama.cpp's ``make_qx_quants`` refines
#: the scale of given codes by least squares; so does ``_refined`` here.


Numbers = Sequence[float]

_SMALLEST = sys.float_info.min * sys.float_info.epsilon  # the smallest double above 0
_FLOAT32_NORMAL = (2.0**-126, 2.0**127)  # where float32 keeps its 24 bits; the upper end leaves room to round up
INT16 = range(-(2**15), 2**15)
ZERO_POINT_FORMAT = {"f": "h", "d": "q"}  # float32 scales with int16 zero points, float64 with int64


class Grid(NamedTuple):
    """The points scale * first, scale * (first + 1), ..., scale * last."""

    scale: float
    first: int
    last: int

    def nearest(self, group: Numbers) -> list[int]:
        """For each number the i whose point scale * i is nearest."""
        scale, first, last = self
        points = [round(x / scale) for x in group]
        if min(points) < first or max(points) > last:
            points = [first if i < first else last if i > last else i for i in points]
        return points

    def error(self, group: Numbers, importance: Numbers) -> float:
        """Sum of importance * (number - its nearest point)**2."""
        misses = [x - self.scale * i for x, i in zip(group, self.nearest(group))]
        return fsum(map(mul, importance, map(mul, misses, misses)))


def choose_grids(groups: Sequence[Numbers], config: QuantizationConfig,
                 importance: Sequence[Numbers]) -> tuple[str, list[Grid]]:
    """The grid of each group, and the format of the scales: "f" (float32), or "d" if any needs a float64.

    ``importance``: the weights of the first group's numbers, the second's, ...; they repeat with each row. Only a
    "search" looks at them, and only at their ratios. A tensor so wide or so far from zero that it needs float64 is
    not searched. O(numbers); a search takes 7 to 10 times as long as none.
    """
    number_format, grids = _full_range_grids(groups, config)
    if config.method == "nearest" or number_format == "d":
        return number_format, grids
    search = wing("calibration.grid_search", "quantization method 'search'").search
    return "f", [search(group, grid, weights, config.symmetric)
                 for group, grid, weights in zip(groups, grids, cycle(importance))]


def lowest_code(config: QuantizationConfig) -> int:
    """The code of a grid's first point."""
    return 1 - 2 ** (config.bits - 1) if config.symmetric else 0


# ---------------------------------------------------------------------------- from the smallest to the largest


def _full_range_grids(groups: Sequence[Numbers], config: QuantizationConfig) -> tuple[str, list[Grid]]:
    """Scales in float32 and zero points in int16 where all fit, else in float64 and int64.

    int64 always suffices: two different doubles are at least 2**-53 of the larger apart, so |low / scale| < 2**62.
    """
    lows, highs = list(map(min, groups)), list(map(max, groups))
    steps = 2**config.bits - 1 - config.symmetric  # from the lowest code to the highest
    if config.symmetric:
        highs = [max(-low, high) for low, high in zip(lows, highs)]
        lows = [-high for high in highs]
    exact = [_scale(low, high, steps) for low, high in zip(lows, highs)]
    candidates = [array("d", exact)]
    if _FLOAT32_NORMAL[0] <= min(exact) and max(exact) <= _FLOAT32_NORMAL[1]:
        candidates.insert(0, _round_up_to_float32(exact))
    for scales in candidates:
        firsts = ([-steps // 2] * len(scales) if config.symmetric else
                  [round(low / scale) for low, scale in zip(lows, scales)])
        if scales.typecode == "d" or (-max(firsts) in INT16 and -min(firsts) in INT16):
            break
    return scales.typecode, [Grid(scale, first, first + steps) for scale, first in zip(scales, firsts)]


def _scale(low: float, high: float, steps: int) -> float:
    """The spacing that takes ``steps`` steps from low to high."""
    if low == high:
        return abs(low) or 1.0  # one grid point is enough: code - zero_point is 1, -1, or 0 for zeros
    width = high - low
    scale = width / steps if width < inf else high / steps - low / steps
    return scale + _SMALLEST  # rounds a subnormal quotient up, so that it is not 0 nor much too small; else no change


def _round_up_to_float32(values: Numbers) -> array[float]:
    """Nearest float32 that is not smaller. Adding 2**-23 of a value moves it past its upper float32 neighbour."""
    nearest = array("f", values)
    return array("f", [v if near >= v else v * (1 + 2**-23) for near, v in zip(nearest, values)])


# ---------------------------------------------------------------------------------------------------------------- codes

__all__ = ["ErrorStats", "QuantizationConfig", "QuantizedTensor", "dequantize", "matvec", "quantize"]

ZeroPoints = Union["array[int]", "array[float]"]

HEADER_BYTES = 16  # rows, columns, group size: 4 bytes each; bits, symmetric and the two number formats: 1 each
_LARGEST = sys.float_info.max

_LONG = 2**31
_DOCUMENT: dict[str, Shape] = {  # what to_dict writes and from_dict accepts
    "shape": ListOf(Integer(1), 2, 2),
    "bits": Integer(4, 8),
    "group_size": Nullable(Integer(1, 2**63 - 1)),
    "symmetric": Boolean(),
    "scale_format": OneOf(("f", "d")),
    "scales": ListOf(Number(0.0, _LARGEST), 1, _LONG),
    "zero_points": ListOf(Integer(-(2**63), 2**63 - 1), 0, _LONG),
    "packed": Text(1, 2 * _LONG),
}
_REAL_ZERO_POINTS: dict[str, Shape] = {**_DOCUMENT, "zero_points": ListOf(Number(-_LARGEST, _LARGEST), 0, _LONG)}


@dataclass(frozen=True)
class ErrorStats:
    """Distance of a dequantized matrix from the original: the largest, the root mean square, and the root mean
    square divided by that of the original (0 for an exact copy, of zeros too)."""

    max_abs: float
    rmse: float
    relative: float


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [rows, columns] of packed codes; nothing else is kept, so every use reads ``packed``.

    ``scales`` and ``zero_points`` hold one number for each group: row r's groups start at r * ceil(columns /
    group_size). ``zero_points`` is empty where symmetric. QuantizationError if the parts contradict each other.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int | None
    symmetric: bool
    scales: array[float]
    zero_points: ZeroPoints
    packed: bytes

    def __post_init__(self) -> None:
        QuantizationConfig(self.bits, self.group_size, self.symmetric)
        rows, columns = self.shape
        if min(self.shape) < 1:
            raise QuantizationError(f"a matrix has at least 1 row and 1 column, not {rows} x {columns}")
        formats = [getattr(numbers, "typecode", None) for numbers in (self.scales, self.zero_points)]
        if formats not in (["f", "h"], ["d", "q"], ["f", "f"]):
            raise QuantizationError("scales and zero points must be arrays of types f and h, d and q, or f and f, "
                                    f"not {formats}")
        groups = rows * self.groups_per_row
        for name, given, wanted in (("scales", len(self.scales), groups),
                                    ("zero points", len(self.zero_points), 0 if self.symmetric else groups),
                                    ("packed bytes", len(self.packed), rows * self.row_bytes)):
            if given != wanted:
                raise QuantizationError(f"{rows} x {columns} numbers, bits {self.bits}, group_size {self.group_size}, "
                                        f"symmetric {self.symmetric}, have {wanted} {name}, not {given}")
        for i, scale in enumerate(self.scales):
            if not 0.0 < scale < inf:
                raise QuantizationError(f"scale {i} must be a finite number above 0, not {scale}")
        if not isfinite(sum(self.zero_points)):  # integers are, and a sum of float32 overflows no double
            raise QuantizationError("zero points must be finite numbers")
        if self.bits * columns % 8 and any(byte >> 4 for byte in self.packed[self.row_bytes - 1::self.row_bytes]):
            raise QuantizationError(f"a row of {columns} nibbles must end in a high nibble of 0: it holds no number")
        unused = -(2 ** (self.bits - 1))
        if self.symmetric and len(self.packed.translate(None, _UNUSED[self.bits])) < len(self.packed):
            raise QuantizationError(f"symmetric codes go from {unused + 1} to {-unused - 1}; {unused} is none of them")

    def __repr__(self) -> str:
        rows, columns = self.shape
        groups = f"groups of {self.group_size}" if self.group_size else "a group a row"
        return (f"<QuantizedTensor {rows} x {columns}: int{self.bits}, {groups}, "
                f"{'' if self.symmetric else 'a'}symmetric; {self.nbytes} bytes, "
                f"{self.nbytes / (4 * rows * columns):.2f} of float32>")

    def _repr_html_(self) -> str | None:
        return picture("tensor_card", self)

    @property
    def row_bytes(self) -> int:
        """Packed bytes of one row; the last may be half used."""
        return (self.shape[1] * self.bits + 7) // 8

    @property
    def groups_per_row(self) -> int:
        """Groups in one row; the last may be shorter."""
        return -(-self.shape[1] // (self.group_size or self.shape[1]))

    @property
    def nbytes(self) -> int:
        """All of it: header, packed codes, scales, zero points. float32 would take 4 * rows * columns."""
        return HEADER_BYTES + len(self.packed) + sum(len(a) * a.itemsize for a in (self.scales, self.zero_points))

    def fingerprint(self) -> bytes:
        """What two matrices of one shape, bits, group size and kind of grid differ in."""
        return self.packed + little_endian(self.scales) + little_endian(self.zero_points)

    def row_codes(self, r: int) -> list[int]:
        """Row r as stored: its ``columns`` codes. IndexError outside 0 .. rows - 1."""
        rows, columns = self.shape
        if not 0 <= r < rows:
            raise IndexError(f"row {r} of a matrix of {rows} rows")
        data = self.packed[r * self.row_bytes:(r + 1) * self.row_bytes]
        if self.bits == 4:
            data = b"".join([_NIBBLES[self.symmetric][byte] for byte in data])[:columns]  # an odd row leaves one over
        return memoryview(data).cast("b" if self.symmetric else "B").tolist()

    def groups(self, r: int) -> Iterator[tuple[float, float, list[int]]]:
        """Row r group by group: (scale, zero point, codes)."""
        codes = self.row_codes(r)
        size = self.group_size or len(codes)
        first = r * self.groups_per_row
        for i, start in enumerate(range(0, len(codes), size), first):
            yield self.scales[i], 0 if self.symmetric else self.zero_points[i], codes[start:start + size]

    def rows(self) -> list[list[float]]:
        """All rows dequantized, as those of a ``weights.Tensor``: 8 bytes a number and more, so to look at only."""
        return [self.row(r) for r in range(self.shape[0])]

    def row(self, r: int) -> list[float]:
        """Row r dequantized."""
        values = [scale * (code - zero) for scale, zero, codes in self.groups(r) for code in codes]
        if self.scales.typecode == "f":
            return values
        return [max(-_LARGEST, min(_LARGEST, v)) for v in values]  # a grid may end beyond the largest float

    def error(self, rows: Sequence[Sequence[float]]) -> ErrorStats:
        """How far this tensor is from ``rows``, a matrix of the same shape."""
        original = _checked_rows(rows)
        if (len(original), len(original[0])) != self.shape:
            raise QuantizationError(f"cannot compare {self.shape[0]} x {self.shape[1]} numbers "
                                    f"with {len(original)} x {len(original[0])}")
        differences = [a - b for r, row in enumerate(original) for a, b in zip(row, self.row(r))]
        error, size = _root_mean_square(differences), _root_mean_square([a for row in original for a in row])
        return ErrorStats(max(map(abs, differences)), error, error / size if size else (inf if error else 0.0))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; ``packed`` in hexadecimal, so that a digit is a nibble."""
        return {"shape": list(self.shape), "bits": self.bits, "group_size": self.group_size,
                "symmetric": self.symmetric, "scale_format": self.scales.typecode, "scales": self.scales.tolist(),
                "zero_points": self.zero_points.tolist(), "packed": self.packed.hex()}

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> QuantizedTensor:
        """The way back. QuantizationError for unknown, missing or malformed keys and for parts that disagree."""
        if not isinstance(document, Mapping) or set(document) != set(_DOCUMENT):
            raise QuantizationError(f"a quantized tensor is an object with exactly the keys {', '.join(_DOCUMENT)}")
        zeros = document["zero_points"]
        real = isinstance(zeros, (list, tuple)) and bool(zeros) and all(isinstance(zero, float) for zero in zeros)
        try:
            shapes = _REAL_ZERO_POINTS if real else _DOCUMENT
            parsed = {key: shape.parse(document[key], f"/{key}") for key, shape in shapes.items()}
            number_format = parsed.pop("scale_format")
            values = parsed.pop("scales")
            scales = array(number_format, values)
            zero_points = array("f" if real else ZERO_POINT_FORMAT[number_format], parsed.pop("zero_points"))
            packed = bytes.fromhex(parsed.pop("packed"))
        except (SchemaError, OverflowError, ValueError) as error:
            raise QuantizationError(f"not a quantized tensor: {error}") from None
        if scales.tolist() != list(values):
            raise QuantizationError("scale_format 'f' is for scales that a float32 holds exactly; write 'd'")
        return cls(scales=scales, zero_points=zero_points, packed=packed, **parsed)


def stacked_codes(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Matrices of equal columns one upon the other, no number changed; None where their forms differ. O(bytes)."""
    first = tensors[0]
    forms = {(q.shape[1], q.bits, q.group_size, q.symmetric, q.scales.typecode, q.zero_points.typecode)
             for q in tensors}
    if len(forms) > 1:
        return None
    scales, zero_points = first.scales[:0], first.zero_points[:0]
    for q in tensors:
        scales += q.scales
        zero_points += q.zero_points  # type: ignore[operator]  # of one typecode
    return replace(first, shape=(sum(q.shape[0] for q in tensors), first.shape[1]), scales=scales,
                   zero_points=zero_points, packed=b"".join(q.packed for q in tensors))


def quantize(rows: Sequence[Sequence[float]], config: QuantizationConfig,
             importance: Sequence[float] | None = None) -> QuantizedTensor:
    """Round every number to its group's grid. O(rows * columns).

    For every element x of every group of finite numbers, with the stored ``scale`` of that group:

        |x - dequantized x|  <=  scale / 2  +  2**-50 * max|group|

    The first term: code - zero_point is the nearest integer to x / scale. Only at the top may that integer have no
    code; then x is at most half a step above the last one, because the grid begins at most half a step above low and,
    its step being rounded up to float32, is at least as long as the range. The second term: doubles round (2**-53,
    relative) in x / scale or low / scale, in a float64 scale, in code - zero_point and in the product, in all at most
    7 * 2**-53 of the largest number. A constant group is one grid point: exact up to the rounding of its scale.

    Method "search" (``quantization.py``) promises something else: in no group is sum(importance * error**2) larger than by
    method "nearest". The bound above then holds for numbers within the grid, while those beyond an end of it become
    that end. 0 stays 0 with both. ``importance``: a number from 0 for each column; None: all alike.
    """
    if not isinstance(config, QuantizationConfig):
        raise QuantizationError(f"a QuantizationConfig is wanted, not {config!r}")
    matrix = _checked_rows(rows)
    columns = len(matrix[0])
    size = config.group_size or columns
    groups = _cut(matrix, size)
    number_format, grids = choose_grids(groups, config, _cut([_checked_importance(importance, columns, config)], size))
    lowest = lowest_code(config)
    codes = [point - grid.first + lowest for group, grid in zip(groups, grids) for point in grid.nearest(group)]
    packed = b"".join(_pack_row(codes[start:start + columns], config.bits)
                      for start in range(0, len(codes), columns))
    scales = array(number_format, [grid.scale for grid in grids])
    zero_points = array(ZERO_POINT_FORMAT[number_format],
                        [] if config.symmetric else [lowest - grid.first for grid in grids])
    return QuantizedTensor((len(matrix), columns), config.bits, config.group_size, config.symmetric,
                           scales, zero_points, packed)


def dequantize(q: QuantizedTensor) -> list[list[float]]:
    """All rows as floats, 8 bytes a number and more: to look at, not to compute with."""
    if not isinstance(q, QuantizedTensor):
        raise QuantizationError(f"a QuantizedTensor is wanted, as quantize() returns it, not {describe(q)}")
    return q.rows()


def matvec(q: QuantizedTensor, x: Sequence[float]) -> list[float]:
    """q [rows, columns] times x [columns] -> [rows], from the packed codes; no row of floats is ever made.

    A group's scale and zero point are the same for all its terms, so they move out of the sum:

        sum(scale * (code - zero) * x)  =  scale * (sum(code * x) - zero * sum(x))

    and sum(x) is the same for all rows. Equal to multiplying with the dequantized row up to the rounding of the sums:
    about group size * 2**-53 * max|group| * sum|x|, group by group.
    """
    rows, columns = q.shape
    if len(x) != columns:
        raise QuantizationError(f"a {rows} x {columns} matrix needs a vector of {columns} numbers, not {len(x)}")
    size = q.group_size or columns
    parts = [x[start:start + size] for start in range(0, columns, size)]
    sums = [sum(part) for part in parts]
    return [sum(scale * (sum(map(mul, codes, part)) - zero * total)
                for (scale, zero, codes), part, total in zip(q.groups(r), parts, sums)) for r in range(rows)]


# ------------------------------------------------------------------------------------------- packing, checking


def little_endian(numbers: array[Any]) -> bytes:
    """The numbers as a file has them, on any machine."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _pack_row(codes: list[int], bits: int) -> bytes:
    """Codes -> bytes; ``& 255`` and ``& 15`` are two's complement."""
    if bits == 8:
        return bytes(code & 255 for code in codes)
    pairs = zip(codes[0::2], [*codes[1::2], 0])  # zip stops at the shorter: only an odd row uses the 0
    return bytes(low & 15 | (high & 15) << 4 for low, high in pairs)


def _unpack_nibbles(byte: int, signed: bool) -> bytes:
    """The two codes in a byte, a byte each."""
    pair = (byte & 15, byte >> 4)
    return bytes((nibble ^ 8) - 8 & 255 for nibble in pair) if signed else bytes(pair)  # 0..7 stay, 8..15 become -8..-1


_UNUSED = {8: b"\x80", 4: bytes(byte for byte in range(256) if 8 in (byte & 15, byte >> 4))}  # hold code -128 or -8
_NIBBLES = {signed: [_unpack_nibbles(byte, signed) for byte in range(256)] for signed in (False, True)}


def _cut(rows: Sequence[Sequence[float]], size: int) -> list[Sequence[float]]:
    """The groups of all rows, row after row."""
    return [row[start:start + size] for row in rows for start in range(0, len(row), size)]


def _checked_importance(importance: Sequence[float] | None, columns: int, config: QuantizationConfig) -> list[float]:
    """``columns`` weights, the largest 1 (or all 0); QuantizationError if they cannot be weights of the columns."""
    if importance is None:
        return [1.0] * columns
    if config.method != "search":
        raise QuantizationError("importance is for method 'search'; 'nearest' weighs no column")
    [weights] = _checked_rows([importance])
    if len(weights) != columns or min(weights) < 0.0:
        raise QuantizationError(f"importance must be {columns} numbers from 0, one for each column, "
                                f"not {len(weights)} numbers from {min(weights)}")
    largest = max(weights) or 1.0
    return [weight / largest for weight in weights]


def _checked_rows(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The matrix as lists of floats; QuantizationError names the first row or number that cannot be one."""
    if not hasattr(rows, "__iter__"):
        raise QuantizationError(f"a sequence of rows is wanted, not {describe(rows)}")
    matrix: list[list[float]] = []
    for r, row in enumerate(rows):
        if not hasattr(row, "__iter__"):
            raise QuantizationError(f"row {r} must be a sequence of numbers, not {describe(row)}")
        if set(map(type, row)) != {float} or not all(map(isfinite, row)):  # the usual row is looked at but once
            for c, x in enumerate(row):
                if not _is_finite_number(x):
                    raise QuantizationError(f"row {r}, column {c} must be a finite number, not {describe(x)}")
        matrix.append(list(map(float, row)))
        if not matrix[r] or len(matrix[r]) != len(matrix[0]):
            raise QuantizationError(f"row {r} has {len(matrix[r])} columns; all rows need equally many, at least 1")
    if not matrix:
        raise QuantizationError("there is no row to quantize; at least 1 is needed")
    return matrix


def _is_finite_number(x: object) -> bool:
    try:
        return isinstance(x, Real) and not isinstance(x, bool) and isfinite(x)
    except OverflowError:  # an integer beyond the largest float
        return False


def _root_mean_square(values: Sequence[float]) -> float:
    """sqrt(mean(v * v)), divided by the largest first so that no square overflows."""
    largest = max(map(abs, values))
    return largest * sqrt(fsum((v / largest) ** 2 for v in values) / len(values)) if largest else 0.0
