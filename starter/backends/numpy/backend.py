"""Optional · The NumPy backend made fast. Read ``starter/numpy_backend.py`` first: here is only what differs.

Attention is computed for many requests at once (``attention.py``), and quantized weights stay packed (``matrices.py``).
A small model's step is a few hundred array operations of some microseconds each, so what counts is how many there are,
and that none makes a large new array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf, isfinite, log, sqrt
from typing import Any, Union

import numpy as np

from starter.backend import Batch, KVBounds, Span
from starter.backends.int8_pages import cut_by_page
from starter.backends.numpy.attention import AttentionPlan, Group, attend, ones
from starter.backends.numpy.contexts import Room
from starter.backends.numpy.int8_pages import NumpyInt8KVStore
from starter.backends.numpy.matrices import PackedMatrix
from starter.base.weights import Tensor
from starter.numpy_backend import Array, NumpyBackend, NumpyKVStore
from starter.quantization import QuantizedTensor, quantize
from starter.sampling import Choice, Logits
from starter.schema import ModelConfig, QuantizationConfig

LARGE = 2**18  # numbers of a matrix
MOST_ROWS = 128  # of a chunk that are computed together
MOST_ANGLES = 2**14  # positions whose angles are kept, 8 MB at most where a head has 128 numbers


class FastNumpyBackend(NumpyBackend):
    """A float matrix is kept transposed, as an array [columns, rows], by which BLAS multiplies a small batch fastest. A
    quantized one is a ``PackedMatrix``."""

    def __init__(self) -> None:
        self._turned: tuple[Sequence[int], tuple[float, ...], Array] = [], (), None

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Any:
        if isinstance(tensor, QuantizedTensor):
            return PackedMatrix(tensor)
        if quantization:
            return PackedMatrix(quantize(tensor.rows(), quantization, importance))
        rows = np.array(tensor.values, dtype=np.float32).reshape(tensor.shape)  # a copy, as of every backend
        return rows.T if rows.size >= LARGE else rows.T.copy()

    def _floats(self, matrix: Any, rows: Any = slice(None)) -> Array:
        if isinstance(matrix, PackedMatrix):
            return matrix.rows(rows)
        return matrix[:, rows].T.copy()  # ``take`` is faster, but would copy all of a table that lies the other way

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int,
                 bounds: Sequence[KVBounds] = (), kv_quantization: str | None = None) -> NumpyStore:
        store = NumpyInt8KVStore if kv_quantization == "int8" else FastNumpyKVStore
        return store(model.layers, model.kv_heads, model.head_width, num_pages, page_size)

    def norm(self, x: Array, gain: Array, epsilon: float) -> Array:
        scale = (x * x).dot(_averaging(len(gain)))                                  # mean of the squares, [T, 1]
        if not scale[scale.argmax(), 0] < inf:  # a square is beyond float32, though the number need not be
            return super().norm(x, gain, epsilon)
        if len(x) == 1:  # a number is faster than an array of one
            return x * (gain * np.float32(1.0 / sqrt(scale.item() + epsilon)))
        scale += epsilon
        normed = x / np.sqrt(scale, out=scale)
        normed *= gain
        return normed

    def linear(self, matrix: Any, x: Array, bias: Array | None = None) -> Array:
        if isinstance(matrix, PackedMatrix):
            rows = matrix.times(x)
        elif matrix.size < LARGE or not 1 < len(x) <= MOST_ROWS:
            rows = x.dot(matrix)
        else:  # for a large matrix and some rows BLAS is faster the other way round, by a fifth to a half
            rows = np.ascontiguousarray(matrix.T.dot(x.T).T)
        return rows if bias is None else rows + bias

    def split(self, x: Array, widths: Sequence[int]) -> list[Array]:
        return [x[:, part] for part in _parts(tuple(widths))]

    def rotate(self, x: Array, positions: Sequence[int], frequencies: tuple[float, ...]) -> Array:
        pairs = x.view(np.complex64)                                                # a + bi: [T, columns / 2]
        return (pairs * self._turns(positions, frequencies, pairs.shape[1])).view(np.float32)

    def _turns(self, positions: Sequence[int], frequencies: tuple[float, ...], pairs: int) -> Array:
        """cos + i sin of every pair's angle, [T, pairs]: the same in every head, and kept for the step's other calls,
        of which the first, for the queries, is the widest."""
        known_positions, known_frequencies, turns = self._turned
        if (known_positions, known_frequencies) != (positions, frequencies) or turns.shape[1] < pairs:
            of_head = _angles(positions, frequencies)                               # [T, d / 2]
            turns = np.empty((len(positions), pairs // len(frequencies), len(frequencies)), dtype=np.complex64)
            turns[:] = of_head[:, None]
            turns = turns.reshape(len(positions), pairs)
            self._turned = list(positions), frequencies, turns
        return turns[:, :pairs]

    def attend(self, q: Array, k: Array, v: Array, layer: int, store: NumpyStore, batch: Batch) -> Array:
        plan = AttentionPlan.of(batch, store)
        store.write_layer(layer, plan.slots, k, v)
        if len(plan.groups) == 1 and isinstance(plan.groups[0].rows, slice):  # all rows, in their order
            return attend(q, *self._context(layer, plan.groups[0], store), plan.groups[0])
        out = np.empty_like(q)
        for group in plan.groups:
            out[group.rows] = attend(q[group.rows], *self._context(layer, group, store), group)
        return out

    @staticmethod
    def _context(layer: int, group: Group, store: NumpyStore) -> tuple[Array, Array]:
        return group.kept.of(layer, group, store) if group.kept else store.gather(layer, group)

    def pick(self, x: Array, rows: Sequence[int]) -> Array:
        return x if len(rows) == len(x) else x.take(rows, 0)  # in their order, each once

    def logits(self, x: Array) -> Sequence[Sequence[float]]:
        best = x.argmax(axis=1)                                     # of equals, the first; of NaN, if there is one
        highest = x[np.arange(len(x)), best]                                        # [rows]
        if not isfinite(sum(highest.tolist())):  # the sampler reports the row that is not finite
            return [row.tolist() if not isfinite(row.max()) else self.logits(row[None])[0] for row in x]
        with np.errstate(over="ignore"):  # from one end of float32 to the other
            below = x - highest[:, None]
        sums = np.exp(below, out=below).dot(ones(x.shape[1]))                       # [rows, 1]
        return [Logits(Choice(token, -log(total)), row)
                for token, total, row in zip(best.tolist(), sums.ravel().tolist(), x)]


@lru_cache
def _parts(widths: tuple[int, ...]) -> list[slice]:
    """Columns of each part."""
    return [slice(end - width, end) for width, end in zip(widths, accumulate(widths))]


def _angles(positions: Sequence[int], frequencies: tuple[float, ...]) -> Array:
    """cos + i sin of the angles of some positions, [T, d / 2]: looked up, if they are not too far out."""
    length = 1 << max(positions).bit_length()
    if length > MOST_ANGLES:
        return _circle(np.asarray(positions), frequencies)
    return _first_angles(length, frequencies)[positions]


@lru_cache(8)
def _first_angles(length: int, frequencies: tuple[float, ...]) -> Array:
    return _circle(np.arange(length), frequencies)


def _circle(positions: Array, frequencies: tuple[float, ...]) -> Array:
    """Made in double: a large angle has few digits left for its place on the circle."""
    return np.exp(1j * positions[:, None] * np.asarray(frequencies)).astype(np.complex64)


@lru_cache
def _averaging(width: int) -> Array:
    """A product with this column is a row's mean, and faster than ``mean``."""
    return np.full((width, 1), 1.0 / width, dtype=np.float32)


class FastNumpyKVStore(NumpyKVStore):
    """The same arrays. ``plan`` is that of the last batch; it may keep contexts, so it goes when a page is changed."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        super().__init__(layers, kv_heads, head_width, num_pages, page_size)
        self.plan: AttentionPlan | None = None
        self._room = Room()

    def parts(self, span: Span) -> Iterable[Span]:
        """All rows of a span see the same numbers, up to their own positions; long chunks are cut for the cache."""
        return [span] if span.count <= MOST_ROWS else cut_by_page(span, MOST_ROWS)

    def looks_the_same(self, group: Group) -> bool:
        """Once written, a position's numbers stay."""
        return True

    def gather(self, layer: int, group: Group) -> tuple[Array, Array]:
        """Keys [S, kv_heads, head_width, n] and values [S, kv_heads, n, head_width] of a group's contexts, until the
        next call."""
        keys, values = self._room.of((*group.slots.shape, self.kv_heads, self.head_width))
        self.keys[layer].take(group.slots, axis=0, out=keys, mode="clip")  # "raise" would gather into a copy
        self.values[layer].take(group.slots, axis=0, out=values, mode="clip")
        return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)

    def newest(self, layer: int, group: Group) -> tuple[Array, Array]:
        """Keys and values of the group's own rows, [S, kv_heads, head_width] each."""
        return self.keys[layer].take(group.written, axis=0), self.values[layer].take(group.written, axis=0)

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        self.plan = None
        super().write(page, offset, key, value)

    def copy_page(self, source: int, target: int, origin: NumpyKVStore | None = None) -> None:
        self.plan = None
        super().copy_page(source, target, origin)


NumpyStore = Union[FastNumpyKVStore, NumpyInt8KVStore]
