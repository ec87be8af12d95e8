"""M1 · Backend "cpu": the operations of ``backend.ReferenceBackend``, with products in lanes of long integers.

Read ``ReferenceBackend`` first; it is the oracle of this one. Here a matrix is a ``LaneMatrix`` (``lanes.py``) and the
pages are a ``LanesKVStore`` (``pages.py``); the rest is the same arithmetic with fewer steps for each number. Float
weights become 14-bit integers with a scale for each row, so the last bits differ from the reference and the tokens do
not (DESIGN.md, "Fast without packages", has the measured distances).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, hypot, sqrt
from typing import Any

from starter.backend import Batch, KVBounds, ReferenceBackend, Row, Rows, rotary_turns, silu
from starter.backends.lanes.int8_pages import LanesInt8KVStore
from starter.backends.lanes.lanes import LaneMatrix
from starter.backends.lanes.pages import MOST_POSITIONS, LanesKVStore
from starter.base.weights import Tensor
from starter.errors import BackendError
from starter.quantization import QuantizedTensor, dequantize
from starter.schema import ModelConfig, QuantizationConfig

MOST_GROWTH = 2**8  # of normed hidden states from the first layer on: what is small all the same keeps 8 bits of 16
NUMBERS = {32: "14-bit, float", 24: "int8", 16: "int4"}  # bits of a lane: the weights that it holds


@dataclass(frozen=True)
class PackedWeights:
    """A matrix in lanes, and the codes that it was made of if it is quantized."""

    lanes: LaneMatrix
    codes: QuantizedTensor | None


class LanesBackend(ReferenceBackend):
    """The reference backend, with matrices and pages in lanes."""

    name = "cpu"

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise BackendError("lanes are read as little-endian numbers; on this machine use backend='reference'")
        self._forms: Counter[tuple[int, int, int]] = Counter()

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Any:
        made = super().matrix(tensor, quantization, importance)
        packed = (PackedWeights(LaneMatrix.of_codes(made), made) if isinstance(made, QuantizedTensor)
                  else PackedWeights(LaneMatrix.of_floats(made), None))
        rows, columns = packed.lanes.shape
        self._forms[rows, columns, packed.lanes.bits] += 1
        return packed

    def plan(self) -> str:
        """The form that each matrix was given, as a table."""
        lines = ["matrices      rows  columns  weights        lanes        MB"]
        for (rows, columns, bits), count in self._forms.items():
            size = count * rows * columns * bits / 8 / 1e6
            lines.append(f"{count:8} {rows:9,} {columns:8,}  {NUMBERS[bits]:13}  {bits} bits {size:7.1f}")
        return "\n".join(lines)

    def rows(self, matrix: Any) -> Rows:
        if matrix.codes:
            return dequantize(matrix.codes)
        return [list(matrix.lanes.row(r)) for r in range(matrix.lanes.shape[0])]

    def matrix_bytes(self, matrix: Any) -> int:
        nbytes: int = matrix.codes.nbytes if matrix.codes else matrix.lanes.nbytes
        return nbytes

    def working_bytes(self, matrix: Any) -> int:
        return matrix.lanes.nbytes if matrix.codes else 0

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> Any:
        if kv_quantization is not None:
            return LanesInt8KVStore(model.layers, model.kv_heads, model.head_width, num_pages, page_size)
        positions = min(model.max_context, num_pages * page_size)
        if positions > MOST_POSITIONS:
            raise BackendError(f"the lanes of backend 'cpu' attend over at most {MOST_POSITIONS:,} positions, not "
                               f"{positions:,}; take fewer pages, or backend='reference' or 'numpy'")
        if bounds and max(layer.share for layer in bounds) > MOST_GROWTH * bounds[0].share:
            raise BackendError("this model's embeddings are so small beside norm_eps that its keys and values would "
                               "lose more than 8 of 16 bits in the lanes of backend 'cpu'; take "
                               "kv_quantization='int8', or backend='reference' or 'numpy'")
        return LanesKVStore(model.layers, model.kv_heads, model.head_width, num_pages, page_size, bounds)

    def embed(self, table: Any, tokens: Sequence[int]) -> Rows:
        row = table.codes.row if table.codes else table.lanes.row
        return [list(row(token)) for token in tokens]

    def norm(self, x: Rows, gain: Row, epsilon: float) -> Rows:
        scales = [sqrt(len(row)) / hypot(*row, sqrt(len(row) * epsilon)) for row in x]  # no square overflows
        return [[value * scale * g for value, g in zip(row, gain)] for row, scale in zip(x, scales)]

    def _products(self, matrix: Any, x: Rows) -> Rows:
        return list(map(matrix.lanes.times, x))

    def rotate(self, x: Rows, positions: Sequence[int], frequencies: tuple[float, ...]) -> Rows:
        return [_rotated(row, *_turns(position, frequencies, len(row) // (2 * len(frequencies))))
                for row, position in zip(x, positions)]

    def attend(self, q: Rows, k: Rows, v: Rows, layer: int, store: Any, batch: Batch) -> Rows:
        store.write_layer(layer, batch.slots, k, v)
        rows: Rows = store.attend(q, layer, batch)
        return rows

    def swiglu(self, gate: Rows, up: Rows) -> Rows:
        return [_swiglu_row(gates, ups) for gates, ups in zip(gate, up)]


def _rotated(row: Row, cosines: Row, sines: Row) -> list[float]:
    turned: list[float] = [0.0] * len(row)
    even, odd = row[0::2], row[1::2]
    turned[0::2] = [a * c - b * s for a, b, c, s in zip(even, odd, cosines, sines)]
    turned[1::2] = [a * s + b * c for a, b, c, s in zip(even, odd, cosines, sines)]
    return turned


def _swiglu_row(gates: Row, ups: Row) -> list[float]:
    try:
        return [z / (1.0 + exp(-z)) * u for z, u in zip(gates, ups)]
    except OverflowError:  # exp(-z) beyond a double
        return [silu(z) * u for z, u in zip(gates, ups)]


@lru_cache(maxsize=65_536)
def _turns(position: int, frequencies: tuple[float, ...], heads: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Cosines and sines of ``backend.rotary_turns``, repeated for each head."""
    cosines, sines = zip(*rotary_turns(position, frequencies) * heads)
    return cosines, sines
