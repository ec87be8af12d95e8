"""M1 · One step laid flat, what a backend does with it, and the plainest backend there is.

``model.py`` writes the decoder once, in the operations of ``Backend``. A backend chooses how three things look in
memory, and nothing else looks inside them: a hidden state (``Hidden``, a row of numbers for each token of the batch), a
weight matrix, and the keys and values inside the KV pages.

    reference   standard library, plain loops: ``ReferenceBackend`` below, the form to read and the oracle of the others
    cpu         standard library, many products in one long integer: several times faster (``backends/lanes/``)
    numpy       the same operations on arrays (``numpy_backend.py``; a faster one in ``backends/numpy/``)
    cuda        the same as kernels on an NVIDIA GPU, or on the processor in its place (``backends/cuda/``)
    auto        numpy if it is installed, else cpu

Shapes in the docstrings: T rows of the batch, D width, H query heads and K key/value heads of d numbers each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain, product
from math import cos, exp, sin, sqrt
from operator import add, mul
from types import MethodType
from typing import Any, NamedTuple, Union

from .base.kv_bounds import KVBounds as KVBounds
from .base.weights import StoredWeights, Tensor
from .base.wings import wing
from .errors import BackendError, MissingWingError
from .kv_cache import KVStore
from .quantization import QuantizedTensor, dequantize, matvec, quantize
from .schema import ModelConfig, QuantizationConfig

# ------------------------------------------------------------------------------------------------ one step, laid flat


class Piece(NamedTuple):
    """What one request computes in a step: ``tokens`` at positions start, start + 1, ...; ``pages``: block table;
    ``wants_logits``: of how many of the last tokens. That is 1 (or True) where the next token is due, else 0, and more
    where a prompt's own tokens get logprobs."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: int


PlainPiece = tuple[Sequence[int], int, Sequence[int], int]  # a Piece, or a tuple of the same four


class Span(NamedTuple):
    """Where one request is in a batch: rows first_row .. first_row + count - 1, at positions end - count .. end - 1."""

    first_row: int
    count: int  # type: ignore[assignment]  # hides the method ``tuple.count``
    end: int
    pages: Sequence[int]
    page_size: int

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.end - self.count

    @property
    def context(self) -> list[int]:
        """Slots of positions 0 .. end - 1; the token at position p may look at the first p + 1. O(end)."""
        return slots(self.pages, self.page_size, 0, self.end)


def slots(pages: Sequence[int], page_size: int, start: int, end: int) -> list[int]:
    """Slots of the positions start .. end - 1 of a block table. O(end - start)."""
    return [pages[position // page_size] * page_size + position % page_size for position in range(start, end)]


@dataclass
class Batch:
    """One step's work as the decoder sees it: the tokens of several requests laid flat, and where their pages are.

        request A decodes its token at position 9     request B prefills positions 0..2
        (pages of 4 slots: A holds pages 5, 0, 7)     (B holds page 2)

        row         0     1   2   3
        tokens     [a9 ,  b0, b1, b2]
        positions  [9  ,  0 , 1 , 2 ]
        slots      [29 ,  8 , 9 , 10]      slot = page * page_size + position % page_size; A writes page 7, offset 1
        spans      [A: row 0, end 10, pages (5, 0, 7)]  [B: rows 1-3, end 3, pages (2,)]
        logit_rows [0, 3]                  only the rows whose next token is due reach the output projection,
        wanted     [1, 1]                  how many rows of each piece

    A row's numbers come from its own token, position and pages, whichever other requests share the step.
    """

    page_size: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[PlainPiece], page_size: int) -> Batch:
        """Lay the pieces flat, in their order. A piece without pages (a request that is computed without a cache) gets
        no slots. O(tokens)."""
        batch = cls(page_size)
        flat, positions, written = batch.tokens, batch.positions, batch.slots
        for tokens, start, pages, wants_logits in pieces:
            count = len(tokens)
            end = start + count
            batch.spans.append(Span(len(flat), count, end, pages, page_size))
            flat += tokens
            if count == 1 and pages:  # a decode: one slot
                positions.append(start)
                written.append(pages[start // page_size] * page_size + start % page_size)
            else:
                positions += range(start, end)
                written += slots(pages, page_size, start, end) if pages else []
            batch.wanted.append(int(wants_logits))
            batch.logit_rows += range(len(flat) - wants_logits, len(flat))
        return batch

    def pieces(self) -> list[Piece]:
        """The pieces that were laid flat. O(tokens)."""
        return [Piece(self.tokens[first:first + count], end - count, pages, wanted)
                for (first, count, end, pages, _), wanted in zip(self.spans, self.wanted)]


# ------------------------------------------------------------------------------------------ what a backend must do

Hidden = Any  # [T, columns], in the backend's own form
Matrix = Any  # [rows, columns], likewise
Vector = Any  # [columns], likewise


class Backend(ABC):
    """The operations of the decoder. Five have a default that is right for most backends: ``working_bytes``,
    ``expect``, ``host_kv_store``, ``step`` and ``logits``. What is loaded is copied: a caller may reuse its arrays."""

    name: str

    def expect(self, weights: StoredWeights, quantization: QuantizationConfig | None) -> None:
        """Called before the first matrix is loaded. BackendError if the device has no room for them all."""
        return  # by default there is room

    @abstractmethod
    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Matrix:
        """Take a 2-D tensor [rows, columns] into the backend's own form. A float tensor is quantized if a config is
        given, by the ``importance`` of each column if that is given (``quantization.quantize``); codes are kept."""

    @abstractmethod
    def vector(self, tensor: Tensor) -> Vector:
        """Take a 1-D tensor into the backend's own form."""

    @abstractmethod
    def rows(self, matrix: Matrix) -> list[list[float]]:
        """A matrix as plain floats, dequantized: what the cache-less oracle computes with."""

    @abstractmethod
    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes of a matrix as it is stored, scales included."""

    def working_bytes(self, matrix: Matrix) -> int:
        """Bytes of a second form of the matrix that is kept to compute faster; by default there is none."""
        return 0

    @abstractmethod
    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> KVStore:
        """Storage for the keys and values of num_pages * page_size tokens, as floats or as "int8"
        (``backends/int8_pages.py``). ``bounds``, one for each layer, say how large the numbers can become."""

    def host_kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                      kv_quantization: str | None = None) -> KVStore:
        """The same for pages that are swapped out, which a backend with a device of its own keeps in host memory."""
        return self.kv_store(model, num_pages, page_size, bounds, kv_quantization)

    def step(self) -> AbstractContextManager[object]:
        """Entered for each step, around the operations that follow; by default it does nothing."""
        return nullcontext()

    @abstractmethod
    def embed(self, table: Matrix, tokens: Sequence[int]) -> Hidden:
        """Rows of the table: [T] token numbers -> [T, D]."""

    @abstractmethod
    def norm(self, x: Hidden, gain: Vector, epsilon: float) -> Hidden:
        """Root-mean-square norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) * gain, row by row."""

    @abstractmethod
    def norm_heads(self, x: Hidden, gain: Vector, epsilon: float) -> Hidden:
        """The same for each head of a row separately; a head is as long as the gain."""

    @abstractmethod
    def linear(self, matrix: Matrix, x: Hidden, bias: Vector | None = None) -> Hidden:
        """x @ matrix.T + bias: [T, columns] -> [T, rows]."""

    @abstractmethod
    def split(self, x: Hidden, widths: Sequence[int]) -> list[Hidden]:
        """Cut every row into parts of these widths: [T, sum(widths)] -> one [T, width] for each."""

    @abstractmethod
    def rotate(self, x: Hidden, positions: Sequence[int], frequencies: tuple[float, ...]) -> Hidden:
        """Rotary embedding (``base/rope.py``): in each head turn the pair (2i, 2i + 1) of a row at position p by the
        angle p * frequencies[i]. A head has two numbers for each frequency."""

    @abstractmethod
    def attend(self, q: Hidden, k: Hidden, v: Hidden, layer: int, store: Any, batch: Batch) -> Hidden:
        """Write the batch's keys and values [T, K * d] into its slots, then let every row's heads look at its own
        request's positions up to its own: softmax(q . k / sqrt(d)) . v, [T, H * d]. Query head h uses key/value head
        h * K // H. No slot outside a span's ``context`` is ever read."""

    @abstractmethod
    def swiglu(self, gate: Hidden, up: Hidden) -> Hidden:
        """silu(gate) * up, element by element, silu(z) = z / (1 + exp(-z)) (Shazeer 2020)."""

    @abstractmethod
    def add(self, x: Hidden, y: Hidden) -> Hidden:
        """x + y: the residual connection."""

    @abstractmethod
    def pick(self, x: Hidden, rows: Sequence[int]) -> Hidden:
        """Some rows of x."""

    @abstractmethod
    def to_lists(self, x: Hidden) -> list[list[float]]:
        """x as lists of Python floats."""

    def logits(self, x: Hidden) -> Sequence[Sequence[float]]:
        """Rows of logits for the sampler: by default lists; ``sampling.Logits`` from a backend that has already found
        the likeliest token of each row."""
        return self.to_lists(x)


# ------------------------------------------------------------------------------------------ how a backend is found

_BACKENDS = {  # name: (its class, then a plainer one for a copy without that wing), the package it needs, the extra
    "reference": (("backend.ReferenceBackend",), None, None),
    "cpu": (("backends.lanes.backend.LanesBackend", "backend.ReferenceBackend"), None, None),
    "numpy": (("backends.numpy.backend.FastNumpyBackend", "numpy_backend.NumpyBackend"), "numpy", "numpy"),
    "cuda": (("backends.cuda.backend.CudaBackend",), "warp", "cuda"),
}


def load_backend(backend: str | Backend = "auto", **options: Any) -> Backend:
    """Find a backend by name, or pass a ready one through. Only "cuda" has ``options`` (``backends/cuda/backend.py``):
    ``device``, "cuda:0" or "cpu"; ``dtype``, "float32" or "float16". BackendError for an unknown or missing one."""
    if options and backend != "cuda":
        raise BackendError(f"{', '.join(options)} can be chosen for backend 'cuda' only, not for {backend!r}")
    if not isinstance(backend, str):
        _complete(backend)
        return backend
    if backend == "auto":
        backend = "numpy" if find_spec("numpy") else "cpu"
    if backend not in _BACKENDS:
        allowed = ", ".join(map(repr, (*_BACKENDS, "auto")))
        raise BackendError(f"there is no backend {backend!r}; allowed: {allowed}")
    (*preferred, last), package, extra = _BACKENDS[backend]
    if package and not find_spec(package):
        raise BackendError(f"backend {backend!r} needs {package}, which is not installed: pip install '.[{extra}]'")
    for place in preferred:
        with suppress(MissingWingError):
            return _make(place, backend, options)
    return _make(last, backend, options)


def _make(place: str, backend: str, options: dict[str, Any]) -> Backend:
    module, _, name = place.rpartition(".")
    made: Backend = getattr(wing(module, f"backend {backend!r}"), name)(**options)
    return made


def _complete(backend: object) -> None:
    """Give a ready backend whose class does not inherit from ``Backend`` the defaults that it lacks. BackendError names
    the operations that are missing and have no default."""
    lacking = [name for name in vars(Backend) if name[0] != "_" and not hasattr(backend, name)]
    if missing := [name for name in lacking if name in Backend.__abstractmethods__]:
        raise BackendError(f"{backend!r} is no backend: it has no {', '.join(missing)}")
    if not isinstance(getattr(backend, "name", None), str):
        raise BackendError(f"{backend!r} is no backend: it has no name, which timelines record")
    for name in lacking:
        setattr(backend, name, MethodType(getattr(Backend, name), backend))


# ------------------------------------------------------------------------------------------ the reference backend

Row = Sequence[float]
Rows = list[list[float]]  # a hidden state: one row for each token
PlainMatrix = Union[list["array[float]"], QuantizedTensor]  # float32 numbers as they were loaded, or packed codes


class ReferenceBackend(Backend):
    """The operations in plain loops, in double precision: the form to read.

    Every row is computed separately and every sum runs in one fixed order, so a request's numbers are bitwise the same
    alone, in any batch and in any chunking. The guarantee "batch equals solo" needs no other argument here.
    """

    name = "reference"

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Any:
        if isinstance(tensor, QuantizedTensor):
            return tensor.copy()
        rows, columns = tensor.shape
        cut = [tensor.values[r * columns:(r + 1) * columns] for r in range(rows)]
        return quantize(cut, quantization, importance) if quantization else cut

    def vector(self, tensor: Tensor) -> list[float]:
        return list(tensor.values)

    def rows(self, matrix: PlainMatrix) -> Rows:
        return dequantize(matrix) if isinstance(matrix, QuantizedTensor) else [list(row) for row in matrix]

    def matrix_bytes(self, matrix: PlainMatrix) -> int:
        if isinstance(matrix, QuantizedTensor):
            return matrix.nbytes
        return sum(len(row) * row.itemsize for row in matrix)

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> Any:
        store: Any = ReferenceKVStore
        if kv_quantization == "int8":
            store = wing("backends.int8_pages", "kv_quantization 'int8'").Int8KVStore
        return store(model.layers, model.kv_heads, model.head_width, num_pages, page_size)

    def embed(self, table: PlainMatrix, tokens: Sequence[int]) -> Rows:
        if isinstance(table, QuantizedTensor):
            return [table.row(token) for token in tokens]
        return [list(table[token]) for token in tokens]

    def norm(self, x: Rows, gain: Row, epsilon: float) -> Rows:
        scales = [1.0 / sqrt(dot(row, row) / len(row) + epsilon) for row in x]
        return [[value * scale * g for value, g in zip(row, gain)] for row, scale in zip(x, scales)]

    def norm_heads(self, x: Rows, gain: Row, epsilon: float) -> Rows:
        heads = ([row[start:start + len(gain)] for start in range(0, len(row), len(gain))] for row in x)
        return [list(chain.from_iterable(self.norm(parts, gain, epsilon))) for parts in heads]

    def linear(self, matrix: PlainMatrix, x: Rows, bias: Row | None = None) -> Rows:
        rows = self._products(matrix, x)
        return rows if bias is None else [list(map(add, row, bias)) for row in rows]

    def _products(self, matrix: PlainMatrix, x: Rows) -> Rows:
        if isinstance(matrix, QuantizedTensor):
            return [matvec(matrix, row) for row in x]
        return [[dot(weights, row) for weights in matrix] for row in x]

    def split(self, x: Rows, widths: Sequence[int]) -> list[Rows]:
        return [[row[end - width:end] for row in x] for width, end in zip(widths, accumulate(widths))]

    def rotate(self, x: Rows, positions: Sequence[int], frequencies: tuple[float, ...]) -> Rows:
        out: Rows = []
        for row, position in zip(x, positions):
            turns = rotary_turns(position, frequencies) * (len(row) // (2 * len(frequencies)))  # the same in every head
            pairs = ((a * c - b * s, a * s + b * c) for (c, s), a, b in zip(turns, row[0::2], row[1::2]))
            out.append(list(chain.from_iterable(pairs)))
        return out

    def attend(self, q: Rows, k: Rows, v: Rows, layer: int, store: Any, batch: Batch) -> Rows:
        store.write_layer(layer, batch.slots, k, v)
        parts = [part for span in batch.spans for part in store.parts(span)]
        return [row for part in parts for row in self._attend_part(q, layer, store, part)]

    def _attend_part(self, q: Rows, layer: int, store: Any, part: Span) -> Rows:
        rows, d = q[part.first_row:part.first_row + part.count], store.head_width
        group = len(rows[0]) // store.row_width  # query heads that share a key/value head
        out: Rows = [[] for _ in rows]
        for head in range(store.kv_heads):
            keys, columns = store.context(layer, head, part)
            for seen, (row, mixed) in enumerate(zip(rows, out), part.start + 1):
                for first in range(head * group * d, (head + 1) * group * d, d):
                    mixed += attention(row[first:first + d], keys[:seen], columns)
        return out

    def swiglu(self, gate: Rows, up: Rows) -> Rows:
        return [[silu(z) * u for z, u in zip(gates, ups)] for gates, ups in zip(gate, up)]

    def add(self, x: Rows, y: Rows) -> Rows:
        return [list(map(add, a, b)) for a, b in zip(x, y)]

    def pick(self, x: Rows, rows: Sequence[int]) -> Rows:
        return [x[row] for row in rows]

    def to_lists(self, x: Rows) -> Rows:
        return x


def dot(x: Row, y: Row) -> float:
    """Inner product, summed from left to right (the shorter of the two decides the length)."""
    return sum(map(mul, x, y), 0.0)


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


class ReferenceKVStore(KVStore):
    """Keys and values as ``array('d')`` rows: ``keys[layer][head][slot]`` is one head of one token.

    ``page_bytes`` counts the numbers, 8 bytes each; Python's own overhead for each small array comes on top.
    """

    def __init__(self, layers: int, kv_heads: int, head_width: int, num_pages: int, page_size: int) -> None:
        self.layers, self.kv_heads, self.head_width, self.page_size = layers, kv_heads, head_width, page_size
        self.row_width = kv_heads * head_width  # of one layer
        self.width = layers * self.row_width
        self.page_bytes = 2 * 8 * page_size * self.width
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
        """A span in parts whose rows see the same numbers, up to their own positions: here all of them do."""
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
        key, value = ([number for layer in numbers for head in layer for number in head[slot]]
                      for numbers in (self.keys, self.values))
        return key, value

    def copy_page(self, source: int, target: int, origin: ReferenceKVStore | None = None) -> None:
        size, origin = self.page_size, origin or self
        for theirs, ours in ((origin.keys, self.keys), (origin.values, self.values)):
            for layer, head in product(range(self.layers), range(self.kv_heads)):
                page = theirs[layer][head][source * size:(source + 1) * size]
                ours[layer][head][target * size:(target + 1) * size] = page
