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

The zero point is an integer of any size, never clamped into the range of the codes: a group far from zero (weights
around 1e6 that differ by 1e-3) keeps its fine grid. -128 and -8 stay unused, so that -code is always a code.

Packed: row after row, each from a fresh byte. int8 is a byte a code; int4 two codes a byte, the low nibble first, and
the last high nibble of an odd row is 0. Symmetric codes are two's complement, asymmetric ones unsigned.

Scales are float32 and zero points int16, so int8 in groups of 32 takes 9 bits a number (9.5 asymmetric), int4 takes
5 (5.5), not float32's 32. A tensor with a group too large, too small or too far from zero for these stores all its
scales as float64 and all its zero points as int64.

    q = quantize([[0.5, -1.0, 2.0]], QuantizationConfig(bits=4, group_size=2))
    dequantize(q)                 # every number within half a step of its group; ``quantize`` states the bound
    matvec(q, [1.0, 2.0, 3.0])    # the product, straight from the packed codes

Sources: Jacob et al. 2018 (scale and zero point); Shen et al. 2020, "Q-BERT" (a scale for every group).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf, isfinite, sqrt
from numbers import Real
from operator import mul

from .errors import QuantizationError, SchemaError
from .schema import QuantizationConfig
from .shapes import Boolean, Choice, Integer, ListOf, Nullable, Number, Shape, Text, describe

__all__ = ["ErrorStats", "QuantizationConfig", "QuantizedTensor", "dequantize", "matvec", "quantize"]

HEADER_BYTES = 16  # rows, columns, group size: 4 bytes each; bits, symmetric and the two number formats: 1 each
_ZERO_POINT_FORMAT = {"f": "h", "d": "q"}  # float32 scales with int16 zero points, float64 with int64
_LARGEST = sys.float_info.max
_SMALLEST = 5e-324
_FLOAT32_NORMAL = (2.0**-126, 2.0**127)  # where float32 keeps its 24 bits; the upper end leaves room to round up

_LONG = 2**31
_DOCUMENT: dict[str, Shape] = {  # what to_dict writes and from_dict accepts
    "shape": ListOf(Integer(1), 2, 2),
    "bits": Integer(4, 8),
    "group_size": Nullable(Integer(1, 2**63 - 1)),
    "symmetric": Boolean(),
    "scale_format": Choice(("f", "d")),
    "scales": ListOf(Number(0.0, _LARGEST), 1, _LONG),
    "zero_points": ListOf(Integer(-(2**63), 2**63 - 1), 0, _LONG),
    "packed": Text(1, 2 * _LONG),
}


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
    zero_points: array[int]
    packed: bytes

    def __post_init__(self) -> None:
        QuantizationConfig(self.bits, self.group_size, self.symmetric)
        rows, columns = self.shape
        if min(self.shape) < 1:
            raise QuantizationError(f"a matrix has at least 1 row and 1 column, not {rows} x {columns}")
        formats = [getattr(numbers, "typecode", None) for numbers in (self.scales, self.zero_points)]
        if formats not in (["f", "h"], ["d", "q"]):
            raise QuantizationError(f"scales and zero points must be arrays of types f and h or d and q, not {formats}")
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
        if self.bits * columns % 8 and any(byte >> 4 for byte in self.packed[self.row_bytes - 1::self.row_bytes]):
            raise QuantizationError(f"a row of {columns} nibbles must end in a high nibble of 0: it holds no number")
        unused = -(2 ** (self.bits - 1))
        if self.symmetric and any(unused in self.row_codes(r) for r in range(rows)):
            raise QuantizationError(f"symmetric codes go from {unused + 1} to {-unused - 1}; {unused} is none of them")

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

    def row_codes(self, r: int) -> list[int]:
        """Row r as stored: its ``columns`` codes. IndexError outside 0 .. rows - 1."""
        rows, columns = self.shape
        if not 0 <= r < rows:
            raise IndexError(f"row {r} of a matrix of {rows} rows")
        data = self.packed[r * self.row_bytes:(r + 1) * self.row_bytes]
        if self.bits == 4:
            data = b"".join([_NIBBLES[self.symmetric][byte] for byte in data])[:columns]  # an odd row leaves one over
        return memoryview(data).cast("b" if self.symmetric else "B").tolist()

    def groups(self, r: int) -> Iterator[tuple[float, int, list[int]]]:
        """Row r group by group: (scale, zero point, codes)."""
        codes = self.row_codes(r)
        size = self.group_size or len(codes)
        first = r * self.groups_per_row
        for i, start in enumerate(range(0, len(codes), size), first):
            yield self.scales[i], 0 if self.symmetric else self.zero_points[i], codes[start:start + size]

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
        try:
            parsed = {key: shape.parse(document[key], f"/{key}") for key, shape in _DOCUMENT.items()}
            number_format = parsed.pop("scale_format")
            values = parsed.pop("scales")
            scales = array(number_format, values)
            zero_points = array(_ZERO_POINT_FORMAT[number_format], parsed.pop("zero_points"))
            packed = bytes.fromhex(parsed.pop("packed"))
        except (SchemaError, OverflowError, ValueError) as error:
            raise QuantizationError(f"not a quantized tensor: {error}") from None
        if scales.tolist() != list(values):
            raise QuantizationError("scale_format 'f' is for scales that a float32 holds exactly; write 'd'")
        return cls(scales=scales, zero_points=zero_points, packed=packed, **parsed)


def quantize(rows: Sequence[Sequence[float]], config: QuantizationConfig) -> QuantizedTensor:
    """Round every number to its group's grid. O(rows * columns).

    For every element x of every group of finite numbers, with the stored ``scale`` of that group:

        |x - dequantized x|  <=  scale / 2  +  2**-50 * max|group|

    The first term: code - zero_point is the nearest integer to x / scale. Only at the top may that integer have no
    code; then x is at most half a step above the last one, because the grid begins at most half a step above low and,
    its step being rounded up to float32, is at least as long as the range. The second term: doubles round (2**-53,
    relative) in x / scale or low / scale, in a float64 scale, in code - zero_point and in the product, in all at most
    7 * 2**-53 of the largest number. A constant group is one grid point: exact up to the rounding of its scale.
    """
    if not isinstance(config, QuantizationConfig):
        raise QuantizationError(f"a QuantizationConfig is wanted, not {config!r}")
    matrix = _checked_rows(rows)
    columns = len(matrix[0])
    size = config.group_size or columns
    groups = [row[start:start + size] for row in matrix for start in range(0, columns, size)]
    scales, zero_points = _grids(groups, config)
    highest = 2 ** (config.bits - config.symmetric) - 1
    # x / scale and round() never fall when x grows, so no code is below the lowest number's, which is the lowest code.
    codes = [min(round(x / scale) + zero, highest)
             for group, scale, zero in zip(groups, scales, zero_points) for x in group]
    packed = b"".join(_pack_row(codes[start:start + columns], config.bits)
                      for start in range(0, len(codes), columns))
    stored = array(_ZERO_POINT_FORMAT[scales.typecode], [] if config.symmetric else zero_points)
    return QuantizedTensor((len(matrix), columns), config.bits, config.group_size, config.symmetric,
                           scales, stored, packed)


def dequantize(q: QuantizedTensor) -> list[list[float]]:
    """All rows as floats, 8 bytes a number and more: to look at, not to compute with."""
    return [q.row(r) for r in range(q.shape[0])]


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


# ------------------------------------------------------------------------------------------- choosing grids


def _grids(groups: Sequence[Sequence[float]], config: QuantizationConfig) -> tuple[array[float], list[int]]:
    """Scale and zero point of every group, in float32 and int16 where all fit, else in float64 and int64.

    int64 always suffices: two different doubles are at least 2**-53 of the larger apart, so |low / scale| < 2**62.
    """
    lows, highs = list(map(min, groups)), list(map(max, groups))
    steps = 2**config.bits - 1  # from the lowest code to the highest
    if config.symmetric:
        highs = [max(-low, high) for low, high in zip(lows, highs)]
        lows = [-high for high in highs]
        steps -= 1
    exact = [_scale(low, high, steps) for low, high in zip(lows, highs)]
    candidates = [array("d", exact)]
    if _FLOAT32_NORMAL[0] <= min(exact) and max(exact) <= _FLOAT32_NORMAL[1]:
        candidates.insert(0, _round_up_to_float32(exact))
    for scales in candidates:
        zero_points = [0 if config.symmetric else -round(low / scale) for low, scale in zip(lows, scales)]
        if scales.typecode == "d" or max(map(abs, zero_points)) < 2**15:
            break
    return scales, zero_points


def _scale(low: float, high: float, steps: int) -> float:
    """The spacing that takes ``steps`` steps from low to high."""
    if low == high:
        return abs(low) or 1.0  # one grid point is enough: code - zero_point is 1, -1, or 0 for zeros
    width = high - low
    scale = width / steps if width < inf else high / steps - low / steps
    return scale + _SMALLEST  # rounds a subnormal quotient up, so that it is not 0 nor much too small; else no change


def _round_up_to_float32(values: Sequence[float]) -> array[float]:
    """Nearest float32 that is not smaller. Adding 2**-23 of a value moves it past its upper float32 neighbour."""
    nearest = array("f", values)
    return array("f", [v if near >= v else v * (1 + 2**-23) for near, v in zip(nearest, values)])


# ------------------------------------------------------------------------------------------- packing, checking


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


_NIBBLES = {signed: [_unpack_nibbles(byte, signed) for byte in range(256)] for signed in (False, True)}


def _checked_rows(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The matrix as lists of floats; QuantizationError names the first row or number that cannot be one."""
    matrix: list[list[float]] = []
    for r, row in enumerate(rows):
        if not hasattr(row, "__iter__"):
            raise QuantizationError(f"row {r} must be a sequence of numbers, not {describe(row)}")
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
