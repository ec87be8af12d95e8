"""Vectors and matrices that callers pass as sequences of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, sqrt
from numbers import Real

from starter.base.strict_json import describe
from starter.errors import QuantizationError, RequestError


def checked_vector(name: str, vector: Sequence[float], width: int) -> list[float]:
    """The vector as ``width`` floats. RequestError if it is anything else."""
    try:
        numbers = [float(number) for number in vector]
    except (TypeError, ValueError, OverflowError):  # the last one for an integer beyond the largest float
        raise RequestError(f"the {name} must be a sequence of numbers, not {vector!r}") from None
    if len(numbers) != width:
        raise RequestError(f"the {name} must have {width} numbers, not {len(numbers)}")
    return numbers


def checked_rows(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The matrix as lists of floats. QuantizationError names the first row or number that is not allowed."""
    if not hasattr(rows, "__iter__"):
        raise QuantizationError(f"rows must be a sequence of rows, not {describe(rows)}")
    matrix: list[list[float]] = []
    for r, row in enumerate(rows):
        if not hasattr(row, "__iter__"):
            raise QuantizationError(f"row {r} must be a sequence of numbers, not {describe(row)}")
        if set(map(type, row)) != {float} or not all(map(isfinite, row)):  # the fast test of the usual row
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


def root_mean_square(values: Sequence[float]) -> float:
    """sqrt(mean(v * v)), divided by the largest first so that no square overflows."""
    largest = max(map(abs, values))
    return largest * sqrt(fsum((v / largest) ** 2 for v in values) / len(values)) if largest else 0.0
