"""Optional · The decoder's operations on NumPy arrays (extra ``numpy``); importing ``starter`` never imports this.

Hidden states are float32 arrays [T, columns]; keys and values live in arrays preallocated for the whole pool and are
gathered by slot number, for many requests at once (``backends/numpy/attention.py``). A small model's step is a few hundred array
operations of some microseconds each, so what counts is how many there are, and that none makes a large new array.

Rows of a matrix product may be rounded differently in batches of different size (BLAS picks its kernel by shape), so
here "batch equals solo" means equal greedy tokens and logits within 1e-4, not equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import isfinite, log, sqrt
from typing import Any, Union

import numpy as np

from starter import numpy_backend
from starter.backend import Batch, KVBounds, Span
from starter.backends.int8_pages import cut_by_page
from starter.backends.numpy.attention import Group, Plan, attend, ones
from starter.backends.numpy.contexts import Room
from starter.backends.numpy.int8_pages import NumpyInt8KVStore
from starter.backends.numpy.matrices import PackedMatrix
from starter.base.records import quick
from starter.base.weights import Tensor
from starter.quantization import QuantizedTensor, quantize
from starter.sampling import Choice, Logits
from starter.schema import ModelConfig, QuantizationConfig

_choice = quick(Choice)

Array = Any  # numpy.ndarray, float32
Matrix = Any  # Array [columns, rows], or PackedMatrix

LARGE = 2**18  # numbers of a matrix
MOST_ROWS = 128  # of a chunk that are computed together
MOST_ANGLES = 2**14  # positions whose angles are kept, 8 MB at most where a head has 128 numbers


class FastNumpyBackend(numpy_backend.NumpyBackend):
    """Implements ``backend.Backend``. A float matrix is kept transposed, [columns, rows]: BLAS multiplies a small batch
    fastest by that. A quantized one is a ``PackedMatrix``."""

    name = "numpy"

    def __init__(self) -> None:
        self._turned: tuple[Sequence[int], tuple[float, ...], Array] = [], (), None

    # ------------------------------------------------------------------------------------------ loading

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Matrix:
        if isinstance(tensor, QuantizedTensor):
            return PackedMatrix(tensor)
        if quantization:
            return PackedMatrix(quantize(tensor.rows(), quantization, importance))
        turned = np.frombuffer(tensor.values, dtype=np.float32).reshape(tensor.shape).T
        return turned if turned.size >= LARGE else turned.copy()

    def vector(self, tensor: Tensor) -> Array:
        return np.array(tensor.values, dtype=np.float32)

    def rows(self, matrix: Matrix) -> list[list[float]]:
        rows = matrix.rows(slice(None)) if isinstance(matrix, PackedMatrix) else matrix.T
        return self.to_lists(rows)

    def matrix_bytes(self, matrix: Matrix) -> int:
        return int(matrix.nbytes)

    def working_bytes(self, matrix: Matrix) -> int:
        return 0

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int,
                 bounds: Sequence[KVBounds] = (), kv_quantization: str | None = None) -> NumpyStore:
        store = NumpyInt8KVStore if kv_quantization == "int8" else NumpyKVStore
        return store(model.layers, model.kv_heads, model.head_width, num_pages, page_size)

    # --------------------------------------------------------------------------------------- operations

    def embed(self, table: Matrix, tokens: Sequence[int]) -> Array:
        if isinstance(table, PackedMatrix):
            return table.rows(tokens)
        return table[:, tokens].T.copy()  # ``take`` is faster, but would copy all of a table that lies the other way

    def norm(self, x: Array, gain: Array, epsilon: float) -> Array:
        scale = (x * x).dot(_averaging(len(gain)))                                  # mean of the squares, [T, 1]
        if len(x) == 1:  # a number is faster than an array of one
            return x * (gain * np.float32(1.0 / sqrt(scale.item() + epsilon)))
        scale += epsilon
        normed = x / np.sqrt(scale, out=scale)
        normed *= gain
        return normed

    def norm_heads(self, x: Array, gain: Array, epsilon: float) -> Array:
        return self.norm(x.reshape(-1, len(gain)), gain, epsilon).reshape(x.shape)

    def linear(self, matrix: Matrix, x: Array, bias: Array | None = None) -> Array:
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
        plan = Plan.of(batch, store)
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

    def swiglu(self, gate: Array, up: Array) -> Array:
        half = gate * np.float32(0.5)  # z / (1 + exp(-z)) = z/2 (1 + tanh(z/2)), in which nothing overflows
        share = np.tanh(half)
        share += 1.0
        share *= half
        share *= up
        return share

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def pick(self, x: Array, rows: Sequence[int]) -> Array:
        return x if len(rows) == len(x) else x.take(rows, 0)  # in their order, each once

    def logits(self, x: Array) -> Sequence[Sequence[float]]:
        best = x.argmax(axis=1)                                     # of equals, the first; of NaN, if there is one
        highest = x[np.arange(len(x)), best]                                        # [wanted]
        if not isfinite(sum(highest.tolist())):  # of one that is not finite the sampler will complain
            return [row.tolist() if not isfinite(row.max()) else self.logits(row[None])[0] for row in x]
        with np.errstate(over="ignore"):  # from one end of float32 to the other
            below = x - highest[:, None]
        sums = np.exp(below, out=below).dot(ones(x.shape[1]))                       # [wanted, 1]
        return [Logits(_choice((token, -log(total), ())), row)
                for token, total, row in zip(best.tolist(), sums.ravel().tolist(), x)]

    def to_lists(self, x: Any) -> list[list[float]]:
        lists: list[list[float]] = np.asarray(x).tolist()
        return lists


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


class NumpyKVStore:
    """Keys and values of the whole pool: arrays [layers, slots, kv_heads, head_width], float32."""

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        self.kv_heads, self.head_width, self.page_size = kv_heads, head_width, page_size
        self.width = layers * kv_heads * head_width
        self.page_bytes = 2 * 4 * page_size * self.width
        self.tail_bytes = self.peak_tails = 0
        self.plan: Plan | None = None
        self.keys = np.zeros((layers, num_pages * page_size, kv_heads, head_width), dtype=np.float32)
        self.values = np.zeros_like(self.keys)
        self._room = Room()

    def write_layer(self, layer: int, slots: Sequence[int], k: Array, v: Array) -> None:
        """Put rows [T, kv_heads * head_width] of one layer into their slots."""
        shape = (len(slots), self.kv_heads, self.head_width)
        self.keys[layer][slots] = k.reshape(shape)
        self.values[layer][slots] = v.reshape(shape)

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
        self.plan = None  # and with it what it keeps, which may be of this page
        shape = (-1, self.kv_heads, self.head_width)
        slot = page * self.page_size + offset
        self.keys[:, slot] = np.asarray(key, dtype=np.float32).reshape(shape)
        self.values[:, slot] = np.asarray(value, dtype=np.float32).reshape(shape)

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        slot = page * self.page_size + offset
        return self.keys[:, slot].ravel().tolist(), self.values[:, slot].ravel().tolist()

    def copy_page(self, source: int, target: int, origin: NumpyKVStore | None = None) -> None:
        self.plan = None  # and with it what it keeps, which may be of this page
        size, origin = self.page_size, origin or self
        for theirs, ours in ((origin.keys, self.keys), (origin.values, self.values)):
            ours[:, target * size:(target + 1) * size] = theirs[:, source * size:(source + 1) * size]

    def settle(self, page: int) -> None:
        """Nothing is kept besides the page."""


NumpyStore = Union[NumpyKVStore, NumpyInt8KVStore]
