"""M1 · The decoder's operations in plain standard-library Python: the form to read first.

A hidden state is a list with one row (a list of floats) for each token. Every row is computed on its own and
every sum runs in one fixed order, so a request's numbers are bitwise the same alone, in any batch and in any
chunking: the guarantee "batch equals solo" needs no further argument here.

Weights stay the float32 numbers they were loaded as (4 bytes each), or packed int8/int4; arithmetic is double.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, product
from math import cos, exp, sin, sqrt
from operator import add, mul
from typing import Union

from .backend import KVBounds
from .batch import Batch, Span
from .int8_pages import Int8KVStore
from .quantization import QuantizedTensor, dequantize, matvec, quantize
from .schema import ModelConfig, QuantizationConfig
from .weights import Tensor

Row = Sequence[float]
Rows = list[list[float]]
FloatMatrix = list["array[float]"]
Matrix = Union[FloatMatrix, QuantizedTensor]


def dot(x: Row, y: Row) -> float:
    """Inner product, summed from left to right (the shorter of the two decides the length)."""
    return sum(map(mul, x, y), 0.0)


class CpuBackend:
    """Implements ``backend.Backend``."""

    name = "reference"

    # ------------------------------------------------------------------------------------------ loading

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Matrix:
        if isinstance(tensor, QuantizedTensor):
            return tensor
        rows, columns = tensor.shape
        cut = [tensor.values[r * columns:(r + 1) * columns] for r in range(rows)]
        return quantize(cut, quantization, importance) if quantization else cut

    def vector(self, tensor: Tensor) -> list[float]:
        return list(tensor.values)

    def rows(self, matrix: Matrix) -> Rows:
        return dequantize(matrix) if isinstance(matrix, QuantizedTensor) else [list(row) for row in matrix]

    def matrix_bytes(self, matrix: Matrix) -> int:
        if isinstance(matrix, QuantizedTensor):
            return matrix.nbytes
        return sum(len(row) * row.itemsize for row in matrix)

    def working_bytes(self, matrix: Matrix) -> int:
        return 0

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> CpuStore:
        store = Int8KVStore if kv_quantization == "int8" else CpuKVStore
        return store(model.layers, model.kv_heads, model.head_width, num_pages, page_size)

    # --------------------------------------------------------------------------------------- operations

    def embed(self, table: Matrix, tokens: Sequence[int]) -> Rows:
        if isinstance(table, QuantizedTensor):
            return [table.row(token) for token in tokens]
        return [list(table[token]) for token in tokens]

    def norm(self, x: Rows, gain: Row, epsilon: float) -> Rows:
        return [self._norm_row(row, gain, epsilon) for row in x]

    def _norm_row(self, row: Row, gain: Row, epsilon: float) -> list[float]:
        scale = 1.0 / sqrt(dot(row, row) / len(row) + epsilon)
        return [value * scale * g for value, g in zip(row, gain)]

    def norm_heads(self, x: Rows, gain: Row, epsilon: float) -> Rows:
        heads = ([row[start:start + len(gain)] for start in range(0, len(row), len(gain))] for row in x)
        return [list(chain.from_iterable(self.norm(parts, gain, epsilon))) for parts in heads]

    def linear(self, matrix: Matrix, x: Rows, bias: Row | None = None) -> Rows:
        rows = self._products(matrix, x)
        return rows if bias is None else [list(map(add, row, bias)) for row in rows]

    def _products(self, matrix: Matrix, x: Rows) -> Rows:
        if isinstance(matrix, QuantizedTensor):
            return [matvec(matrix, row) for row in x]
        return [[dot(weights, row) for weights in matrix] for row in x]

    def split(self, x: Rows, widths: Sequence[int]) -> list[Rows]:
        ends = list(accumulate(widths))
        return [[row[end - width:end] for row in x] for width, end in zip(widths, ends)]

    def rotate(self, x: Rows, positions: Sequence[int], frequencies: tuple[float, ...]) -> Rows:
        return [self._rotate_row(row, position, frequencies) for row, position in zip(x, positions)]

    def _rotate_row(self, row: Row, position: int, frequencies: tuple[float, ...]) -> list[float]:
        turns = rotary_turns(position, frequencies) * (len(row) // (2 * len(frequencies)))
        turned: list[float] = []
        for (c, s), a, b in zip(turns, row[0::2], row[1::2]):
            turned += (a * c - b * s, a * s + b * c)
        return turned

    def attend(self, q: Rows, k: Rows, v: Rows, layer: int, store: CpuStore, batch: Batch) -> Rows:
        store.write_layer(layer, batch.slots, k, v)
        parts = [part for span in batch.spans for part in store.parts(span)]
        return [row for part in parts for row in self._attend_part(q, layer, store, part)]

    def _attend_part(self, q: Rows, layer: int, store: CpuStore, part: Span) -> Rows:
        out: Rows = [[] for _ in range(part.count)]
        group = len(q[part.first_row]) // store.row_width  # query heads that share a key/value head
        for head in range(store.kv_heads):
            keys, columns = store.context(layer, head, part)
            for i, mixed in enumerate(out):
                seen = part.start + i + 1
                row = q[part.first_row + i]
                for first in range(head * group * store.head_width, (head + 1) * group * store.head_width,
                                   store.head_width):
                    mixed += attention(row[first:first + store.head_width], keys[:seen], columns)
        return out

    def swiglu(self, gate: Rows, up: Rows) -> Rows:
        return [[silu(z) * u for z, u in zip(gates, ups)] for gates, ups in zip(gate, up)]

    def add(self, x: Rows, y: Rows) -> Rows:
        return [list(map(add, a, b)) for a, b in zip(x, y)]

    def pick(self, x: Rows, rows: Sequence[int]) -> Rows:
        return [x[row] for row in rows]

    def logits(self, x: Rows) -> Rows:
        return self.to_lists(x)

    def to_lists(self, x: Rows) -> Rows:
        return x


def silu(z: float) -> float:
    """z * sigmoid(z). Below -700 exp(-z) would overflow a double and the true result is zero to 300 digits."""
    return -0.0 if z < -700.0 else z / (1.0 + exp(-z))


def attention(query: Row, keys: Sequence[Row], columns: Sequence[Row]) -> list[float]:
    """One head of one token. query [d]; keys [n][d]; columns [d][>= n], the values transposed -> [d]. O(n d)."""
    scale = 1.0 / sqrt(len(query))
    scores = [dot(query, key) * scale for key in keys]
    highest = max(scores)
    weights = [exp(score - highest) for score in scores]
    total = sum(weights)
    return [dot(weights, column) / total for column in columns]


@lru_cache(maxsize=65_536)
def rotary_turns(position: int, frequencies: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """(cos, sin) of the angle of each pair of a head at a position."""
    angles = [position * frequency for frequency in frequencies]
    return tuple((cos(angle), sin(angle)) for angle in angles)


class CpuKVStore:
    """Keys and values as ``array('d')`` rows: ``keys[layer][head][slot]`` is one head of one token.

    ``page_bytes`` counts the numbers, 8 bytes each; Python's own overhead for each small array comes on top.
    """

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        self.layers, self.kv_heads, self.head_width, self.page_size = layers, kv_heads, head_width, page_size
        self.row_width = kv_heads * head_width  # of one layer
        self.width = layers * self.row_width
        self.page_bytes = 2 * 8 * page_size * self.width
        self.tail_bytes = self.peak_tails = 0
        empty: array[float] = array("d")
        slots = num_pages * page_size
        self.keys = [[[empty] * slots for _ in range(kv_heads)] for _ in range(layers)]
        self.values = [[[empty] * slots for _ in range(kv_heads)] for _ in range(layers)]

    def write_layer(self, layer: int, slots: Sequence[int], k: Rows, v: Rows) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots."""
        for head in range(self.kv_heads):
            part = slice(head * self.head_width, (head + 1) * self.head_width)
            keys, values = self.keys[layer][head], self.values[layer][head]
            for slot, key, value in zip(slots, k, v):
                keys[slot] = array("d", key[part])
                values[slot] = array("d", value[part])

    def parts(self, span: Span) -> list[Span]:
        """All rows of a span see the same numbers, up to their own positions."""
        return [span]

    def context(self, layer: int, head: int, span: Span) -> tuple[list[Row], list[Row]]:
        """Keys of the span's context, and the values transposed: [end][head_width] and [head_width][end]."""
        keys, values = self.keys[layer][head], self.values[layer][head]
        slots = span.context
        return [keys[slot] for slot in slots], list(zip(*[values[slot] for slot in slots]))

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        slot = page * self.page_size + offset
        for layer in range(self.layers):
            part = slice(layer * self.row_width, (layer + 1) * self.row_width)
            self.write_layer(layer, [slot], [list(key[part])], [list(value[part])])

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        slot = page * self.page_size + offset
        return (self._token(self.keys, slot), self._token(self.values, slot))

    def _token(self, numbers: list[list[list[array[float]]]], slot: int) -> list[float]:
        return [number for layer in numbers for head in layer for number in head[slot]]

    def copy_page(self, source: int, target: int, origin: CpuKVStore | None = None) -> None:
        size, origin = self.page_size, origin or self
        for theirs, ours in ((origin.keys, self.keys), (origin.values, self.values)):
            for layer, head in product(range(self.layers), range(self.kv_heads)):
                page = theirs[layer][head][source * size:(source + 1) * size]
                ours[layer][head][target * size:(target + 1) * size] = page

    def settle(self, page: int) -> None:
        """Nothing is kept besides the page."""


CpuStore = Union[CpuKVStore, Int8KVStore]
