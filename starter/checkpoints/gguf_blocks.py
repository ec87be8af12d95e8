"""M5 · Number formats of GGUF files (llama.cpp): to floats, and to and from ``QuantizedTensor`` if that is exact.

A quantized row is a sequence of blocks of 32 numbers x[0..31]; d and m are float16, little-endian:

    kind    block                              bytes    numbers
    F16     float16                                2    x
    BF16    upper half of a float32                2    x
    Q8_0    d, 32 signed bytes q                  34    d * q
    Q4_0    d, 16 bytes                           18    d * (q - 8)     byte j holds q[j] in its low and
    Q4_1    d, m, 16 bytes                        20    d * q + m       q[j + 16] in its high nibble

Our formula is scale * (code - zero_point) with scale > 0. Q4_0 with d > 0 is the same, with zero point 8. A negative d
(about every other block has one) reverses the codes: d * (q - 8) = -d * ((15 - q) - 7). Q8_0 has the code -128, which
our symmetric int8 does not have; if it occurs, the tensor becomes asymmetric, with zero point 128 (reversed: 127). In
Q4_1, m is in general no multiple of d: the zero point is the real number -m / d, rounded to float32, as m + d * q is.

There is no loop over single numbers: a *column*, the j-th byte of all blocks, is one slice with a stride, and codes are
reversed by one XOR of long integers. Measured: 0.015 us a number to a ``QuantizedTensor``, 0.1 us to floats.

Format: ggml's ``ggml-quants.c``, ``dequantize_row_q8_0`` and the functions next to it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from operator import add, mul
from typing import NamedTuple, Union

from starter.base.weights import float32_array
from starter.checkpoints.files import float16_array
from starter.errors import QuantizationError
from starter.quantization import QuantizedTensor, ZeroPoints

Data = Union[bytes, bytearray, memoryview]

BLOCK = 32
_LARGEST_HALF = 65_504.0


class BlockFormat(NamedTuple):
    """The numbers in a block, and its bytes."""

    numbers: int
    nbytes: int

    def bytes_of(self, count: int) -> int:
        """Bytes of ``count`` numbers; QuantizationError unless they are whole blocks."""
        if count % self.numbers:
            raise QuantizationError(f"{count} numbers are not whole blocks of {self.numbers}")
        return count // self.numbers * self.nbytes


FORMATS = {"F16": BlockFormat(1, 2), "BF16": BlockFormat(1, 2),
           "Q8_0": BlockFormat(BLOCK, 34), "Q4_0": BlockFormat(BLOCK, 18), "Q4_1": BlockFormat(BLOCK, 20)}
QUANTIZED = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}  # bits of their codes

_LOW_NIBBLE, _HIGH_NIBBLE = bytes(byte & 15 for byte in range(256)), bytes(byte >> 4 for byte in range(256))
_MINUS_8 = bytes(byte - 8 & 255 for byte in range(256))


# ------------------------------------------------------------------------------------------------- to floats


def dequantize_blocks(kind: str, data: Data, count: int) -> array[float]:
    """The ``count`` numbers as float32, the same bits as in llama.cpp. O(count).

    QuantizationError for an unknown kind, or unless ``data`` has the bytes of exactly ``count`` numbers.
    """
    check_blocks(kind, data, count)
    if kind == "BF16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return float32_array(wide)
    if kind == "F16":
        return float16_array(data)
    scales = _field(kind, data, 0)
    values = array("f", bytes(4 * count))
    for j, column in enumerate(_columns(kind, data)):
        products = map(mul, scales, _signed(kind, column))
        values[j::BLOCK] = array("f", map(add, products, _field(kind, data, 2)) if kind == "Q4_1" else products)
    return values


def check_blocks(kind: str, data: Data, count: int) -> None:
    """QuantizationError for an unknown kind, or unless ``data`` has the bytes of exactly ``count`` numbers."""
    if kind not in FORMATS:
        raise QuantizationError(f"there is no way to read {kind!r} here; known are {', '.join(FORMATS)}")
    needed = FORMATS[kind].bytes_of(count)
    if len(data) != needed:
        raise QuantizationError(f"{count} numbers in {kind} take {needed} bytes, not {len(data)}")


def _halves(raw: Data) -> tuple[float, ...]:
    return struct.unpack(f"<{len(raw) // 2}e", raw)


def _field(kind: str, data: Data, offset: int) -> tuple[float, ...]:
    """The float16 at an offset of every block."""
    step = FORMATS[kind].nbytes
    raw = bytearray(len(data) // step * 2)
    raw[0::2], raw[1::2] = data[offset::step], data[offset + 1::step]
    return _halves(raw)


def _columns(kind: str, data: Data) -> list[bytes]:
    """For j in 0 .. 31: code j of every block, as stored; nibbles a byte each."""
    step = FORMATS[kind].nbytes
    first = 4 if kind == "Q4_1" else 2
    stored = [bytes(data[offset::step]) for offset in range(first, step)]
    if kind == "Q8_0":
        return stored
    return [column.translate(table) for table in (_LOW_NIBBLE, _HIGH_NIBBLE) for column in stored]


def _signed(kind: str, column: bytes) -> Sequence[int]:
    """A column's codes as the numbers that d multiplies."""
    if kind == "Q4_1":
        return column
    return memoryview(column.translate(_MINUS_8) if kind == "Q4_0" else column).cast("b")


# ------------------------------------------------------------------------------------- to and from QuantizedTensor


def as_quantized_tensor(kind: str, data: Data, rows: int, columns: int) -> QuantizedTensor:
    """A matrix of Q8_0, Q4_0 or Q4_1 blocks, with its own codes. Dequantized, it equals ``dequantize_blocks``; Q4_1,
    whose zero points are rounded, within 2**-23 * (|m| + 15 |d|). O(numbers).

    QuantizationError for another kind, for rows that are not whole blocks, and for a d or m that is not finite.
    """
    if kind not in QUANTIZED:
        raise QuantizationError(f"only {', '.join(QUANTIZED)} hold codes, not {kind!r}: dequantize it instead")
    bits = QUANTIZED[kind]
    FORMATS[kind].bytes_of(columns)
    check_blocks(kind, data, rows * columns)
    scales, codes = _field(kind, data, 0), _columns(kind, data)
    size = BLOCK * bits // 8  # packed bytes of a block
    packed = bytearray(size * len(scales))
    for k in range(size):
        packed[k::size] = codes[k] if bits == 8 else _nibbles(codes[2 * k], codes[2 * k + 1])

    symmetric = bits == 8 and min(scales, default=0.0) >= 0.0 and b"\x80" not in packed
    offset = 0 if symmetric or bits == 4 else 0x80  # adding 128 to a signed byte flips its highest bit
    same, flipped = bytes([offset]) * size, bytes([offset ^ 0xFF]) * size
    packed = _xor(packed, b"".join([flipped if d < 0.0 else same for d in scales]))
    zero = 0 if symmetric or kind == "Q4_1" else {8: 0x80, 4: 0x88}[bits]
    for i, d in enumerate(scales):
        if d == 0.0:  # a block of equal numbers, 0 or m, whatever its codes are
            packed[i * size:(i + 1) * size] = bytes([zero]) * size
    steps, zero_points = (_with_minimum(scales, _field(kind, data, 2)) if kind == "Q4_1"
                          else _around_zero(scales, symmetric, 2 ** (bits - 1)))
    return QuantizedTensor((rows, columns), bits, BLOCK, symmetric, steps, zero_points, bytes(packed))


def _around_zero(scales: Sequence[float], symmetric: bool, half: int) -> tuple[array[float], ZeroPoints]:
    """Scales and zero points of d * q or d * (q - half); reversed if d is below 0."""
    zero_points = array("h", [] if symmetric else [half - (d < 0.0) for d in scales])
    return array("f", [abs(d) or 1.0 for d in scales]), zero_points


def _with_minimum(scales: Sequence[float], minima: Sequence[float]) -> tuple[array[float], ZeroPoints]:
    """Scales and zero points of Q4_1's d * q + m; if d is 0, of m alone: |m| * (0 - zero point)."""
    steps = [abs(d) or abs(m) or 1.0 for d, m in zip(scales, minima)]
    zero_points = [15.0 - m / step if d < 0.0 else -m / step for d, m, step in zip(scales, minima, steps)]
    return array("f", steps), array("f", zero_points)


def to_blocks(kind: str, q: QuantizedTensor) -> bytes:
    """The inverse of ``as_quantized_tensor``, for "Q8_0" and "Q4_0". QuantizationError if it would not be exact: groups
    of other than 32 numbers, a scale that is not a float16, a number beyond -128 .. 127 or -8 .. 7 times the scale.
    O(numbers)."""
    if kind not in ("Q8_0", "Q4_0"):
        raise QuantizationError(f"there is a way back to Q8_0 and Q4_0, not to {kind!r}")
    lowest = -(2 ** (QUANTIZED[kind] - 1))
    if q.zero_points.typecode == "f":
        raise QuantizationError(f"{kind} has a number 0, and zero points between the codes have none")
    if q.shape[1] % BLOCK or (q.group_size or q.shape[1]) != BLOCK:
        raise QuantizationError(f"{kind} needs whole groups of {BLOCK}, not groups of {q.group_size} in rows "
                                f"of {q.shape[1]}")
    return b"".join([_block(kind, scale, [code - int(zero) for code in codes], lowest)
                     for r in range(q.shape[0]) for scale, zero, codes in q.groups(r)])


def _block(kind: str, scale: float, points: list[int], lowest: int) -> bytes:
    d = scale
    if max(points) > -lowest - 1:
        d, points = -scale, [-point for point in points]
    if min(points) < lowest or max(points) > -lowest - 1:
        raise QuantizationError(f"{kind} holds {lowest} to {-lowest - 1} times d or -d, "
                                f"not {min(points)} to {max(points)}")
    if abs(d) > _LARGEST_HALF or _halves(head := struct.pack("<e", d)) != (d,):
        raise QuantizationError(f"{kind} has a float16 scale, which cannot be {scale}")
    if kind == "Q8_0":
        return head + struct.pack(f"{BLOCK}b", *points)
    codes = bytes(point - lowest for point in points)
    return head + _nibbles(codes[:BLOCK // 2], codes[BLOCK // 2:])


def _nibbles(low: bytes, high: bytes) -> bytes:
    """low | high << 4, byte by byte; both hold nibbles."""
    return (int.from_bytes(low, "little") | int.from_bytes(high, "little") << 4).to_bytes(len(low), "little")


def _xor(a: bytearray, b: bytes) -> bytearray:
    return bytearray((int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little"))
