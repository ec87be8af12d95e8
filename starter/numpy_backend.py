"""Optional · The decoder's operations on NumPy arrays, in the plainest way (extra ``numpy``).

Read this beside ``backend.ReferenceBackend``, method by method: the same operations, with the loops over rows and
columns inside NumPy. A hidden state is a float32 array [T, columns]. ``backends/numpy/`` makes it faster (requests side
by side, packed weights, int8 pages), and is what ``load_backend("numpy")`` takes if that package is there.

BLAS may round the rows of a product differently in batches of different size, so here "batch equals solo" means equal
greedy tokens and logits within 1e-4, on int8 pages within 1e-2 where the last bit of a float decides between two codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from math import sqrt
from typing import Any

import numpy as np

from .backend import Backend, Batch, KVBounds
from .base.weights import Tensor
from .errors import BackendError
from .kv_cache import KVStore
from .quantization import QuantizedTensor, quantize
from .schema import ModelConfig, QuantizationConfig

Array = Any  # numpy.ndarray, float32


class CodeMatrix:
    """A quantized matrix: one byte for each code, and a scale and a zero point for each group."""

    def __init__(self, q: QuantizedTensor) -> None:
        rows, columns = q.shape
        zeros = q.zero_points if q.zero_points else [0] * len(q.scales)
        self._codes = np.array([q.row_codes(r) for r in range(rows)], dtype=np.int8 if q.symmetric else np.uint8)
        self._scales, self._zeros = (np.array(numbers).reshape(rows, -1) for numbers in (q.scales, zeros))
        self._group = np.arange(columns) // (q.group_size or columns)                # [columns]: the group of each
        self.nbytes = q.nbytes

    def rows(self, chosen: Any) -> Array:
        """Some rows as floats: scale * (code - zero point)."""
        codes = self._codes[chosen].astype(self._scales.dtype)
        numbers = self._scales[chosen][:, self._group] * (codes - self._zeros[chosen][:, self._group])
        return numbers.astype(np.float32)


class NumpyBackend(Backend):
    """Implements ``backend.Backend``. A float matrix is an array [rows, columns], a quantized one a ``CodeMatrix``."""

    name = "numpy"

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Any:
        if isinstance(tensor, QuantizedTensor):
            return CodeMatrix(tensor)
        if quantization:
            return CodeMatrix(quantize(tensor.rows(), quantization, importance))
        return np.array(tensor.values, dtype=np.float32).reshape(tensor.shape)

    def vector(self, tensor: Tensor) -> Array:
        return np.array(tensor.values, dtype=np.float32)

    def rows(self, matrix: Any) -> list[list[float]]:
        return self.to_lists(self._floats(matrix))

    def _floats(self, matrix: Any, rows: Any = slice(None)) -> Array:
        """Some rows of a matrix, or all, as float32."""
        return matrix.rows(rows) if isinstance(matrix, CodeMatrix) else matrix[rows]

    def matrix_bytes(self, matrix: Any) -> int:
        return int(matrix.nbytes)

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> Any:
        if kv_quantization is not None:
            raise BackendError("the plain NumPy backend keeps pages of floats only, and int8 pages need the package "
                               "starter/backends/numpy; leave kv_quantization out")
        return NumpyKVStore(model.layers, model.kv_heads, model.head_width, num_pages, page_size)

    def step(self) -> AbstractContextManager[object]:
        return np.errstate(over="ignore", invalid="ignore", divide="ignore")  # the sampler refuses what is not finite

    def embed(self, table: Any, tokens: Sequence[int]) -> Array:
        return self._floats(table, tokens)

    def norm(self, x: Array, gain: Array, epsilon: float) -> Array:
        squares = np.square(x, dtype=np.float64)  # float32 would end at the square of 1.8e19
        return (x / np.sqrt(squares.mean(axis=-1, keepdims=True) + epsilon) * gain).astype(np.float32)

    def norm_heads(self, x: Array, gain: Array, epsilon: float) -> Array:
        return self.norm(x.reshape(-1, len(gain)), gain, epsilon).reshape(x.shape)

    def linear(self, matrix: Any, x: Array, bias: Array | None = None) -> Array:
        rows = x @ self._floats(matrix).T
        return rows if bias is None else rows + bias

    def split(self, x: Array, widths: Sequence[int]) -> list[Array]:
        return [x[:, end - width:end] for width, end in zip(widths, accumulate(widths))]

    def rotate(self, x: Array, positions: Sequence[int], frequencies: tuple[float, ...]) -> Array:
        pairs = x.reshape(len(x), -1, len(frequencies), 2)                           # [T, heads, d / 2, 2]
        angles = np.outer(positions, frequencies)[:, None]                           # [T, 1, d / 2], in double, since
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)  # large angles need the digits
        a, b = pairs[..., 0], pairs[..., 1]
        return np.stack((a * cos - b * sin, a * sin + b * cos), axis=-1).reshape(x.shape)

    def attend(self, q: Array, k: Array, v: Array, layer: int, store: Any, batch: Batch) -> Array:
        store.write_layer(layer, batch.slots, k, v)
        keys, values, out = store.keys[layer], store.values[layer], np.empty_like(q)
        for span in batch.spans:
            rows, slots = slice(span.first_row, span.first_row + span.count), span.context
            out[rows] = attention(q[rows], keys[slots], values[slots], span.start)  # gathered from the request's pages
        return out

    def swiglu(self, gate: Array, up: Array) -> Array:
        half = gate * np.float32(0.5)  # z / (1 + exp(-z)) = z/2 (1 + tanh(z/2)), in which nothing overflows
        return (np.tanh(half) + 1) * half * up

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def pick(self, x: Array, rows: Sequence[int]) -> Array:
        return x[list(rows)]

    def to_lists(self, x: Any) -> list[list[float]]:
        lists: list[list[float]] = np.asarray(x).tolist()
        return lists


def attention(q: Array, keys: Array, values: Array, start: int) -> Array:
    """softmax(q . k / sqrt(d)) . v of one request's rows at positions start, start + 1, ...: q [t, H * d], keys and
    values [n, K, d] -> as q. Row i sees the first start + i + 1 positions. O(t * n * H * d)."""
    count, (length, kv_heads, width) = len(q), keys.shape
    heads = q.reshape(count, kv_heads, -1, width).transpose(1, 2, 0, 3)              # [K, H / K, t, d]
    scores = heads @ keys.transpose(1, 2, 0)[:, None] / np.float32(sqrt(width))      # [K, H / K, t, n]
    scores = np.where(np.arange(length) <= np.arange(start, start + count)[:, None], scores, np.float32("-inf"))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights @ values.transpose(1, 0, 2)[:, None] / weights.sum(axis=-1, keepdims=True)
    return mixed.transpose(2, 0, 1, 3).reshape(q.shape)


class NumpyKVStore(KVStore):
    """Keys and values of the whole pool: arrays [layers, slots, K, d], float32; slot = page * page_size + offset."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        self.kv_heads, self.head_width, self.page_size = kv_heads, head_width, page_size
        self.width = layers * kv_heads * head_width
        self.page_bytes = 2 * 4 * page_size * self.width
        self.keys = np.zeros((layers, num_pages * page_size, kv_heads, head_width), dtype=np.float32)
        self.values = np.zeros_like(self.keys)

    def write_layer(self, layer: int, slots: Any, k: Array, v: Array) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots."""
        shape = (len(slots), self.kv_heads, self.head_width)
        self.keys[layer][slots] = k.reshape(shape)
        self.values[layer][slots] = v.reshape(shape)

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        slot, shape = page * self.page_size + offset, (-1, self.kv_heads, self.head_width)
        self.keys[:, slot] = np.asarray(key, dtype=np.float32).reshape(shape)
        self.values[:, slot] = np.asarray(value, dtype=np.float32).reshape(shape)

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        slot = page * self.page_size + offset
        return self.keys[:, slot].ravel().tolist(), self.values[:, slot].ravel().tolist()

    def copy_page(self, source: int, target: int, origin: NumpyKVStore | None = None) -> None:
        size, origin = self.page_size, origin or self
        for theirs, ours in ((origin.keys, self.keys), (origin.values, self.values)):
            ours[:, target * size:(target + 1) * size] = theirs[:, source * size:(source + 1) * size]
