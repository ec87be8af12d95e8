"""A quantized tensor as JSON: ``QuantizedTensor.to_dict`` writes it, ``from_dict`` reads it back."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

from starter.base.strict_json import Boolean, Integer, ListOf, Nullable, Number, OneOf, Shape, Text
from starter.errors import QuantizationError, SchemaError

ZERO_POINT_FORMAT = {"f": "h", "d": "q"}  # float32 scales with int16 zero points, float64 with int64

_LONG = 2**31
_LARGEST = sys.float_info.max
_DOCUMENT: dict[str, Shape] = {
    "shape": ListOf(Integer(1), 2, 2),
    "bits": Integer(4, 8),
    "group_size": Nullable(Integer(1, 2**63 - 1)),
    "symmetric": Boolean(),
    "scale_format": OneOf(("f", "d")),
    "scales": ListOf(Number(0.0, _LARGEST), 1, _LONG),
    "zero_points": ListOf(Integer(-(2**63), 2**63 - 1), 0, _LONG),
    "packed": Text(1, 2 * _LONG),  # hexadecimal
}
_REAL_ZERO_POINTS = ListOf(Number(-_LARGEST, _LARGEST), 0, _LONG)  # of grids that have no point at 0


def parse_tensor(document: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of ``QuantizedTensor``. QuantizationError for unknown, missing or malformed keys."""
    if not isinstance(document, Mapping) or set(document) != set(_DOCUMENT):
        raise QuantizationError(f"a quantized tensor is an object with exactly the keys {', '.join(_DOCUMENT)}")
    zeros = document["zero_points"]
    real = isinstance(zeros, (list, tuple)) and bool(zeros) and all(isinstance(zero, float) for zero in zeros)
    shapes = {**_DOCUMENT, "zero_points": _REAL_ZERO_POINTS} if real else _DOCUMENT
    try:
        parts = {key: shape.parse(document[key], f"/{key}") for key, shape in shapes.items()}
        scale_format, scales = parts.pop("scale_format"), list(parts["scales"])
        parts["scales"] = array(scale_format, scales)
        parts["zero_points"] = array("f" if real else ZERO_POINT_FORMAT[scale_format], parts["zero_points"])
        parts["packed"] = bytes.fromhex(parts["packed"])
    except (SchemaError, OverflowError, ValueError) as error:
        raise QuantizationError(f"not a quantized tensor: {error}") from None
    if parts["scales"].tolist() != scales:
        raise QuantizationError("scale_format 'f' is for scales that a float32 holds exactly; write 'd'")
    return parts
