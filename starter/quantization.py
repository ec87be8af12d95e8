"""M5 · Matrices of 8-bit or 4-bit integers: 28% or 16% of the bytes of float32, with a bound on every error.

A row is cut into groups of ``group_size`` numbers. Each group gets a *grid* of equally spaced points, from its smallest
number to its largest, and each number is replaced by the integer of the nearest point, its *code*:

      low                                     high       the group's smallest and largest number
       [---------------------------------------]
     |     |     |     |  ...  |     |     |     |       grid points, multiples of ``scale``
     0     1     2     3      252   253   254   255      their codes (here asymmetric int8)

    dequantized = scale * (code - zero_point)                          the same formula for every format

    format            codes            scale                 zero_point
    symmetric int8    -127 .. 127      max|x| / 127          0, not stored
    symmetric int4      -7 .. 7        max|x| / 7            0, not stored
    asymmetric int8      0 .. 255      (high - low) / 255    -round(low / scale)
    asymmetric int4      0 .. 15       (high - low) / 15     -round(low / scale)

No number is off by more than half a scale (``quantize`` has the exact bound). These are the grids of method "nearest";
method "search" looks for a grid with a smaller squared error (``calibration/grid_search.py``).

- A zero point may be any integer. It is never clamped into the range of the codes, so that a group far from zero
  (weights around 1e6 that differ by 1e-3) keeps its fine grid. -128 and -8 are not used: -code is always a code.
- Codes are packed row by row, each row from a new byte on: an int8 code in one byte, two int4 codes in one, the first
  in the low nibble; the last high nibble of an odd row is 0. Symmetric codes are two's complement, others unsigned.
- Scales are float32 and zero points int16, so int8 in groups of 32 takes 9 bits a number (asymmetric: 9.5), and int4
  takes 5 (5.5). If any group of a tensor is too wide, too narrow or too far from zero for these types, the whole tensor
  has float64 scales and int64 zero points. Grids from other programs may have no point at 0 (llama.cpp's Q4_1,
  ``checkpoints/gguf_blocks.py``): their zero points are float32, anywhere between two integers.

    q = quantize([[0.5, -1.0, 2.0]], QuantizationConfig(bits=4, group_size=2))
    dequantize(q)                 # rows of floats again
    matvec(q, [1.0, 2.0, 3.0])    # the product, straight from the packed codes

Sources: Jacob et al. 2018 (scale and zero point); Shen et al. 2020, "Q-BERT" (a scale for every group).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, ulp
from operator import mul
from typing import NamedTuple, Union

from .base.model_config import QuantizationConfig
from .base.strict_json import describe
from .base.tensor_json import ZERO_POINT_FORMAT, parse_tensor
from .base.vectors import checked_rows, root_mean_square
from .base.weights import little_endian
from .base.wings import picture, wing
from .errors import QuantizationError

Numbers = Sequence[float]
ZeroPoints = Union["array[int]", "array[float]"]

HEADER_BYTES = 16  # rows, columns, group size: 4 bytes each; bits, symmetric and the two number formats: 1 each
INT16 = range(-(2**15), 2**15)

_LARGEST, _SMALLEST = sys.float_info.max, ulp(0.0)  # of the doubles above 0
_FLOAT32_NORMAL = (2.0**-126, 2.0**127)  # where float32 keeps its 24 bits; the upper end leaves room to round up

_NIBBLES = {False: [(byte & 15, byte >> 4) for byte in range(256)]}  # the two codes in a byte: unsigned, and signed
_NIBBLES[True] = [((low ^ 8) - 8, (high ^ 8) - 8) for low, high in _NIBBLES[False]]  # 8 .. 15 become -8 .. -1
_UNUSED = {8: b"\x80", 4: bytes(byte for byte in range(256) if -8 in _NIBBLES[True][byte])}  # bytes with -128 or -8


# ---------------------------------------------------------------------------------------------------------------- grids


class Grid(NamedTuple):
    """The points scale * first, scale * (first + 1), ..., scale * last. ``first`` has the lowest code."""

    scale: float
    first: int
    last: int

    def nearest(self, group: Numbers) -> list[int]:
        """For each number the i whose point scale * i is nearest; beyond an end of the grid, that end."""
        scale, first, last = self
        points = [round(x / scale) for x in group]
        return [first if i < first else last if i > last else i for i in points]


def choose_grids(groups: Sequence[Numbers], config: QuantizationConfig) -> tuple[str, list[Grid]]:
    """Grids from each group's smallest to its largest number, and the format of all their scales: "f" (float32, with
    zero points in int16) if all groups fit, else "d" (float64, with int64). O(numbers).

    int64 always suffices: two different doubles are at least 2**-53 of the larger apart, so |low / scale| < 2**62.
    """
    steps = 2**config.bits - 1 - config.symmetric  # from the lowest code to the highest
    lows, highs = list(map(min, groups)), list(map(max, groups))
    if config.symmetric:
        highs = [max(-low, high) for low, high in zip(lows, highs)]
        lows = [-high for high in highs]
    exact = [_scale(low, high, steps) for low, high in zip(lows, highs)]
    if _FLOAT32_NORMAL[0] <= min(exact) and max(exact) <= _FLOAT32_NORMAL[1]:
        grids = _grids(_round_up_to_float32(exact), lows, steps, config.symmetric)
        if all(-grid.first in INT16 for grid in grids):
            return "f", grids
    return "d", _grids(exact, lows, steps, config.symmetric)


def _grids(scales: Numbers, lows: Numbers, steps: int, symmetric: bool) -> list[Grid]:
    """Grids of these scales, each ``steps`` steps long, that begin near the low ends of their groups."""
    firsts = [-steps // 2 if symmetric else round(low / scale) for scale, low in zip(scales, lows)]
    return [Grid(scale, first, first + steps) for scale, first in zip(scales, firsts)]


def lowest_code(config: QuantizationConfig) -> int:
    """The code of a grid's first point."""
    return 1 - 2 ** (config.bits - 1) if config.symmetric else 0


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


# ----------------------------------------------------------------------------------------------------------- the tensor


@dataclass(frozen=True)
class ErrorStats:
    """How far a dequantized matrix is from the original."""

    max_abs: float  # the largest error
    rmse: float  # the root mean square of all errors
    relative: float  # rmse / the root mean square of the original; 0 if there is no error


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [rows, columns] of packed codes. No float copy is kept: every use reads ``packed``.

    ``scales`` and ``zero_points`` hold one number for each group, row after row; ``zero_points`` is empty if symmetric.
    QuantizationError if the parts contradict each other.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int | None
    symmetric: bool
    scales: array[float]
    zero_points: ZeroPoints
    packed: bytes

    def __post_init__(self) -> None:
        QuantizationConfig(self.bits, self.group_size, self.symmetric)  # checks these three
        rows, columns = self.shape
        if min(self.shape) < 1:
            raise QuantizationError(f"a matrix has at least 1 row and 1 column, not {rows} x {columns}")
        formats = [getattr(numbers, "typecode", None) for numbers in (self.scales, self.zero_points)]
        if formats not in (["f", "h"], ["d", "q"], ["f", "f"]):
            raise QuantizationError("scales and zero points must be arrays of types f and h, d and q, or f and f, "
                                    f"not {formats}")
        groups = rows * self.groups_per_row
        for what, given, needed in (("scales", len(self.scales), groups),
                                    ("zero points", len(self.zero_points), 0 if self.symmetric else groups),
                                    ("packed bytes", len(self.packed), rows * self.row_bytes)):
            if given != needed:
                raise QuantizationError(f"{rows} x {columns} numbers, bits {self.bits}, group_size {self.group_size}, "
                                        f"symmetric {self.symmetric}, have {needed} {what}, not {given}")
        for i, scale in enumerate(self.scales):
            if not 0.0 < scale < inf:
                raise QuantizationError(f"scale {i} must be a finite number above 0, not {scale}")
        if not isfinite(sum(self.zero_points)):  # the sum of finite float32 or int64 numbers is finite
            raise QuantizationError("zero points must be finite numbers")
        if self.bits * columns % 8 and any(byte >> 4 for byte in self.packed[self.row_bytes - 1::self.row_bytes]):
            raise QuantizationError(f"a row of {columns} nibbles must end in a high nibble of 0: it holds no number")
        if self.symmetric and len(self.packed.translate(None, _UNUSED[self.bits])) < len(self.packed):
            half = 2 ** (self.bits - 1)
            raise QuantizationError(f"symmetric codes go from {1 - half} to {half - 1}; {-half} is none of them")

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
        """Packed bytes of one row; the last one may be half used."""
        return (self.shape[1] * self.bits + 7) // 8

    @property
    def groups_per_row(self) -> int:
        """Groups in one row; the last one may be shorter."""
        return -(-self.shape[1] // (self.group_size or self.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of header, packed codes, scales and zero points. float32 would take 4 * rows * columns."""
        return HEADER_BYTES + len(self.packed) + sum(len(a) * a.itemsize for a in (self.scales, self.zero_points))

    def copy(self) -> QuantizedTensor:
        """One with arrays of its own."""
        return replace(self, scales=self.scales[:], zero_points=self.zero_points[:], packed=bytes(self.packed))

    def fingerprint(self) -> bytes:
        """The bytes that distinguish two tensors of one shape and format, for ``weights.weights_digest``."""
        return self.packed + little_endian(self.scales) + little_endian(self.zero_points)

    def row_codes(self, r: int) -> list[int]:
        """The codes of row r, [columns]. IndexError outside 0 .. rows - 1."""
        rows, columns = self.shape
        if not 0 <= r < rows:
            raise IndexError(f"row {r} of a matrix of {rows} rows")
        data = self.packed[r * self.row_bytes:(r + 1) * self.row_bytes]
        if self.bits == 8:
            return array("b" if self.symmetric else "B", data).tolist()
        pairs = _NIBBLES[self.symmetric]
        return [code for byte in data for code in pairs[byte]][:columns]  # the last nibble of an odd row is no code

    def groups(self, r: int) -> Iterator[tuple[float, float, list[int]]]:
        """Row r group by group: (scale, zero point, codes)."""
        codes = self.row_codes(r)
        size = self.group_size or len(codes)
        for i, start in enumerate(range(0, len(codes), size), start=r * self.groups_per_row):
            yield self.scales[i], 0 if self.symmetric else self.zero_points[i], codes[start:start + size]

    def row(self, r: int) -> list[float]:
        """Row r dequantized."""
        values = [scale * (code - zero) for scale, zero, codes in self.groups(r) for code in codes]
        if self.scales.typecode == "f":
            return values
        return [max(-_LARGEST, min(_LARGEST, v)) for v in values]  # a grid may end beyond the largest float

    def rows(self) -> list[list[float]]:
        """All rows dequantized, as ``weights.Tensor.rows`` has them."""
        return [self.row(r) for r in range(self.shape[0])]

    def error(self, rows: Sequence[Numbers]) -> ErrorStats:
        """How far this tensor is from ``rows``, a matrix of the same shape."""
        original = checked_rows(rows)
        if (len(original), len(original[0])) != self.shape:
            raise QuantizationError(f"cannot compare {self.shape[0]} x {self.shape[1]} numbers "
                                    f"with {len(original)} x {len(original[0])}")
        differences = [a - b for r, row in enumerate(original) for a, b in zip(row, self.row(r))]
        error, size = root_mean_square(differences), root_mean_square([a for row in original for a in row])
        return ErrorStats(max(map(abs, differences)), error, error / size if size else (inf if error else 0.0))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values, as ``base/tensor_json.py`` declares them; in ``packed`` a digit is a nibble."""
        return {"shape": list(self.shape), "bits": self.bits, "group_size": self.group_size,
                "symmetric": self.symmetric, "scale_format": self.scales.typecode, "scales": self.scales.tolist(),
                "zero_points": self.zero_points.tolist(), "packed": self.packed.hex()}

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> QuantizedTensor:
        """The inverse of ``to_dict``. QuantizationError for unknown, missing or malformed keys and for parts that
        contradict each other."""
        return cls(**parse_tensor(document))


def stacked_codes(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """The rows of several matrices in one, no number changed; None if their columns or formats differ. O(bytes)."""
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


# ------------------------------------------------------------------------------------------------ quantize and multiply


def quantize(rows: Sequence[Numbers], config: QuantizationConfig, importance: Numbers | None = None) -> QuantizedTensor:
    """Round every number to the grid of its group. O(rows * columns); a search takes 7 to 10 times as long.

    For every element x of every group of finite numbers, with the stored ``scale`` of that group:

        |x - dequantized x|  <=  scale / 2  +  2**-50 * max|group|

    The first term: code - zero_point is the integer nearest to x / scale. Only above the last code can that integer be
    out of range, and then x is at most half a step above the grid: the grid begins at most half a step above low, and
    its length is at least high - low, because the scale was rounded up. The second term: doubles round (2**-53,
    relative) in x / scale or low / scale, in a float64 scale, in code - zero_point and in the product, in all at most
    7 * 2**-53 of the largest number. A constant group is one grid point, exact up to the rounding of its scale.

    Method "search" promises something else: in no group is sum(importance * error**2) larger than with "nearest". Its
    grids may be narrower than their groups: a number beyond an end of the grid becomes that end, and the bound above
    holds for the others. 0 stays 0 with both methods.

    ``importance``: a weight of at least 0 for each column (``calibration/importance.py``); None: all equal.
    """
    if not isinstance(config, QuantizationConfig):
        raise QuantizationError(f"config must be a QuantizationConfig, not {config!r}")
    matrix = checked_rows(rows)
    columns = len(matrix[0])
    size = config.group_size or columns
    groups = _cut(matrix, size)
    number_format, grids = choose_grids(groups, config)
    if config.method == "search":
        search = wing("calibration.grid_search", "quantization method 'search'")
        weights = search.column_weights(importance, columns)
        if number_format == "f":
            grids = search.search_grids(groups, grids, _cut([weights], size), config.symmetric)
    elif importance is not None:
        raise QuantizationError("importance is for method 'search'; 'nearest' weighs no column")
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
    """All rows as floats. They take 8 bytes a number and more: to look at, not to compute with."""
    if not isinstance(q, QuantizedTensor):
        raise QuantizationError(f"dequantize takes a QuantizedTensor, as quantize() returns it, not {describe(q)}")
    return q.rows()


def matvec(q: QuantizedTensor, x: Numbers) -> list[float]:
    """q [rows, columns] times x [columns] -> [rows], from the packed codes; no row of floats is ever made.

    A group's scale and zero point are the same for all its terms, so they move out of the sum:

        sum(scale * (code - zero) * x)  =  scale * (sum(code * x) - zero * sum(x))

    and sum(x) is the same for all rows. Equal to multiplying by the dequantized row up to the rounding of the sums:
    about group size * 2**-53 * max|group| * sum|x|, group by group.
    """
    rows, columns = q.shape
    if len(x) != columns:
        raise QuantizationError(f"a {rows} x {columns} matrix needs a vector of {columns} numbers, not {len(x)}")
    parts = _cut([x], q.group_size or columns)
    sums = [sum(part) for part in parts]
    return [sum(scale * (sum(map(mul, codes, part)) - zero * total)
                for (scale, zero, codes), part, total in zip(q.groups(r), parts, sums)) for r in range(rows)]


def _cut(rows: Sequence[Numbers], size: int) -> list[Numbers]:
    """The groups of all rows, row after row."""
    return [row[start:start + size] for row in rows for start in range(0, len(row), size)]


def _pack_row(codes: list[int], bits: int) -> bytes:
    """Codes -> bytes; ``& 255`` and ``& 15`` are two's complement."""
    if bits == 8:
        return bytes(code & 255 for code in codes)
    pairs = zip(codes[0::2], [*codes[1::2], 0])  # zip stops at the shorter: only an odd row uses the 0
    return bytes(low & 15 | (high & 15) << 4 for low, high in pairs)
