"""Optional · The decoder's operations on NumPy arrays (extra ``numpy``); importing ``starter`` never imports this.

Hidden states are float32 arrays [T, columns]; keys and values live in arrays preallocated for the whole pool and are
gathered by slot number, request by request. Rows of a matrix product may be rounded differently in batches of
different size (BLAS picks its kernel by shape), so here "batch equals solo" means equal greedy tokens and logits
within 1e-4, not equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from .backend import KVBounds
from .batch import Batch, Span
from .numpy_int8_pages import NumpyInt8KVStore
from .quantization import dequantize, quantize
from .schema import ModelConfig, QuantizationConfig
from .weights import Tensor

Array = Any  # numpy.ndarray, float32


class NumpyBackend:
    """Implements ``backend.Backend``. A quantized matrix is quantized as everywhere and then kept as the float32
    array it stands for: this backend shows quantization's *error*, not yet its memory."""

    name = "numpy"

    # ------------------------------------------------------------------------------------------ loading

    def matrix(self, tensor: Tensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Array:
        array = np.array(tensor.values, dtype=np.float32).reshape(tensor.shape)
        if quantization:
            array = np.array(dequantize(quantize(tensor.rows(), quantization, importance)), dtype=np.float32)
        return array

    def vector(self, tensor: Tensor) -> Array:
        return np.array(tensor.values, dtype=np.float32)

    def rows(self, matrix: Array) -> list[list[float]]:
        rows: list[list[float]] = matrix.tolist()
        return rows

    def matrix_bytes(self, matrix: Array) -> int:
        return int(matrix.nbytes)

    def working_bytes(self, matrix: Array) -> int:
        return 0

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int,
                 bounds: Sequence[KVBounds] = (), kv_quantization: str | None = None) -> NumpyStore:
        store = NumpyInt8KVStore if kv_quantization == "int8" else NumpyKVStore
        return store(model.layers, model.kv_heads, model.head_width, num_pages, page_size)

    # --------------------------------------------------------------------------------------- operations

    def embed(self, table: Array, tokens: Sequence[int]) -> Array:
        return table[np.asarray(tokens)]

    def norm(self, x: Array, gain: Array, epsilon: float) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + epsilon) * gain

    def linear(self, matrix: Array, x: Array) -> Array:
        return x @ matrix.T

    def split(self, x: Array, widths: Sequence[int]) -> list[Array]:
        return np.split(x, np.cumsum(widths)[:-1], axis=1)

    def rotate(self, x: Array, positions: Sequence[int], head_width: int, theta: float) -> Array:
        frequencies = theta ** (-np.arange(0, head_width, 2) / head_width)          # [d / 2]
        angles = np.asarray(positions)[:, None] * frequencies                       # [T, d / 2], in double
        c, s = (f(angles)[:, None, :].astype(np.float32) for f in (np.cos, np.sin))  # [T, 1, d / 2]
        pairs = x.reshape(len(x), -1, head_width // 2, 2)                           # [T, H, d / 2, 2]
        a, b = pairs[..., 0], pairs[..., 1]
        return np.stack((a * c - b * s, a * s + b * c), axis=-1).reshape(x.shape)

    def attend(self, q: Array, k: Array, v: Array, layer: int, store: NumpyStore, batch: Batch) -> Array:
        store.write_layer(layer, batch.slots, k, v)
        parts = [part for span in batch.spans for part in store.parts(span)]
        return np.concatenate([self._attend_part(q, layer, store, part) for part in parts])

    def _attend_part(self, q: Array, layer: int, store: NumpyStore, part: Span) -> Array:
        keys, values = store.context(layer, part)                                   # [n, K, d]
        rows = q[part.first_row:part.first_row + part.count]
        grouped = rows.reshape(part.count, store.kv_heads, -1, store.head_width)    # [t, K, G, d]
        scores = np.einsum("tkgd,nkd->kgtn", grouped, keys) / np.sqrt(np.float32(store.head_width))
        seen = np.arange(part.end) <= np.arange(part.start, part.end)[:, None]      # [t, n], causal
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("kgtn,nkd->tkgd", weights, values).reshape(rows.shape)

    def swiglu(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-z) = inf for very negative z gives the right silu: -0.0
            return gate / (1.0 + np.exp(-gate)) * up

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def pick(self, x: Array, rows: Sequence[int]) -> Array:
        return x[np.asarray(rows)]

    def to_lists(self, x: Any) -> list[list[float]]:
        lists: list[list[float]] = np.asarray(x).tolist()
        return lists


class NumpyKVStore:
    """Keys and values of the whole pool: arrays [layers, slots, kv_heads, head_width], float32."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        self.kv_heads, self.head_width, self.page_size = kv_heads, head_width, page_size
        self.width = layers * kv_heads * head_width
        self.page_bytes = 2 * 4 * page_size * self.width
        self.tail_bytes = self.peak_tails = 0
        self.keys = np.zeros((layers, num_pages * page_size, kv_heads, head_width), dtype=np.float32)
        self.values = np.zeros_like(self.keys)

    def write_layer(self, layer: int, slots: Sequence[int], k: Array, v: Array) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots."""
        shape = (len(slots), self.kv_heads, self.head_width)
        self.keys[layer, np.asarray(slots)] = k.reshape(shape)
        self.values[layer, np.asarray(slots)] = v.reshape(shape)

    def parts(self, span: Span) -> list[Span]:
        """All rows of a span see the same numbers, up to their own positions."""
        return [span]

    def context(self, layer: int, span: Span) -> tuple[Array, Array]:
        """Keys and values of the span's context, [end, kv_heads, head_width] each."""
        slots = np.asarray(span.context)
        return self.keys[layer, slots], self.values[layer, slots]

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        shape = (-1, self.kv_heads, self.head_width)
        slot = page * self.page_size + offset
        self.keys[:, slot] = np.asarray(key, dtype=np.float32).reshape(shape)
        self.values[:, slot] = np.asarray(value, dtype=np.float32).reshape(shape)

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        slot = page * self.page_size + offset
        return self.keys[:, slot].ravel().tolist(), self.values[:, slot].ravel().tolist()

    def copy_page(self, source: int, target: int, origin: NumpyKVStore | None = None) -> None:
        size, origin = self.page_size, origin or self
        for theirs, ours in ((origin.keys, self.keys), (origin.values, self.values)):
            ours[:, target * size:(target + 1) * size] = theirs[:, source * size:(source + 1) * size]

    def settle(self, page: int) -> None:
        """Nothing is kept besides the page."""


NumpyStore = Union[NumpyKVStore, NumpyInt8KVStore]
