"""M1 · What a backend must be able to do, and how one is found by name.

``model.py`` writes the decoder once, in these operations. A backend chooses how a hidden state (``Hidden``:
one row of ``width`` numbers for each token of the batch), a matrix and the numbers inside the KV pages look in
memory; nobody else looks inside. Shapes below: T rows of the batch, D width, H query heads of d numbers.

    reference   standard library, plain loops: the form to read, and the oracle of the others
    cpu         standard library, products in lanes of long integers: several times faster
    numpy       the same operations on arrays (extra ``numpy``)
    cuda        the same as kernels on an NVIDIA GPU, or on the processor in its place (extra ``cuda``)
    auto        numpy where it is installed, else cpu
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain, product
from math import cos, exp, sin, sqrt
from operator import add, mul
from typing import Any, NamedTuple, Protocol, Union

from .base.records import quick
from .base.weights import Tensor
from .base.wings import wing
from .errors import BackendError, MissingWingError
from .kv_cache import KVStore
from .quantization import QuantizedTensor, dequantize, matvec, quantize
from .schema import ModelConfig, QuantizationConfig

# ------------------------------------------------------------------------------------------------------- one step, flat

#: One step's work as the decoder sees it: tokens of several requests laid flat, and where their pages are.
#:
#:     request A decodes its token at position 9     request B prefills positions 0..2
#:     (pages of 4 slots: A holds pages 5, 0, 7)     (B holds page 2)
#:
#:     row         0     1   2   3
#:     tokens     [a9 ,  b0, b1, b2]
#:     positions  [9  ,  0 , 1 , 2 ]
#:     slots      [29 ,  8 , 9 , 10]      slot = page * page_size + position % page_size; A writes page 7, offset 1
#:     spans      [A: row 0, end 10, pages (5, 0, 7)]  [B: rows 1-3, end 3, pages (2,)]
#:     logit_rows [0, 3]                  only rows whose next token is wanted reach the output projection
#:
#: Nothing here depends on who shares the step: a row's numbers come from its own token, position and pages.


class Piece(NamedTuple):
    """What one request computes in a step: ``tokens`` at positions start, start + 1, ...; ``pages``: block table."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool


PlainPiece = tuple[Sequence[int], int, Sequence[int], bool]  # a Piece, or the same without the names


class Span(NamedTuple):
    """The rows of one request in a batch: rows first_row .. first_row + count - 1, positions end - count .. end - 1."""

    first_row: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    end: int
    pages: Sequence[int]
    page_size: int

    @property
    def context(self) -> list[int]:
        """Slots of positions 0 .. end - 1; the token at position p may look at the first p + 1. O(end)."""
        return slots(self.pages, self.page_size, 0, self.end)

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.end - self.count


_span = quick(Span)


def slots(pages: Sequence[int], page_size: int, start: int, end: int) -> list[int]:
    """Slots of the positions start .. end - 1 of a block table. O(end - start)."""
    first = start // page_size
    found = [page * page_size + offset for page in pages[first:-(-end // page_size)] for offset in range(page_size)]
    return found[start - first * page_size:end - first * page_size]


@dataclass
class Batch:
    """Flat rows of all pieces, in their order."""

    page_size: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[PlainPiece], page_size: int) -> Batch:
        """Lay the pieces flat. One without pages, of a request that is computed without a cache, has no slots.
        O(tokens)."""
        tokens: list[int] = []
        positions: list[int] = []
        written: list[int] = []
        spans: list[Span] = []
        logit_rows: list[int] = []
        for new, start, pages, wants_logits in pieces:
            count = len(new)
            spans.append(_span((len(tokens), count, start + count, pages, page_size)))
            tokens += new
            if count == 1 and pages:  # as nearly always
                positions.append(start)
                written.append(pages[start // page_size] * page_size + start % page_size)
            else:
                positions += range(start, start + count)
                written += slots(pages, page_size, start, start + count)
            if wants_logits:
                logit_rows.append(len(tokens) - 1)
        return cls(page_size, tokens, positions, written, spans, logit_rows)

    def pieces(self) -> list[Piece]:
        """The pieces that were laid flat. O(tokens)."""
        wanted = set(self.logit_rows)
        return [Piece(self.tokens[first:first + count], end - count, pages, first + count - 1 in wanted)
                for first, count, end, pages, _ in self.spans]


# ----------------------------------------------------------------------------------------------- what a backend must do

Hidden = Any  # [T, columns], the backend's own type
Matrix = Any  # [rows, columns], the backend's own type
Vector = Any  # [columns], the backend's own type


@dataclass(frozen=True)
class KVBounds:
    """Of one layer: the largest absolute value that each number of a token's key and value can have, [kv_width]."""

    keys: Sequence[float]
    values: Sequence[float]


class Backend(Protocol):
    """The operations of the decoder."""

    name: str

    # A backend with a device of its own may have ``expect(weights, quantization)``, which is told what will be loaded,
    # and refuses what does not fit before the first of it is.

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> Matrix:
        """Take a 2-D tensor [rows, columns] into the backend's own form, quantized where a config is given, with an
        ``importance`` for each column where there is one (``quantization.quantize``). Codes stay what they are."""

    def vector(self, tensor: Tensor) -> Vector:
        """Take a 1-D tensor into the backend's own form."""

    def rows(self, matrix: Matrix) -> list[list[float]]:
        """A matrix as plain floats, dequantized: what the cache-less reference computes with."""

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes that the numbers of a matrix occupy as they are stored, scales included."""

    def working_bytes(self, matrix: Matrix) -> int:
        """Bytes of what was made of them to compute faster, and is kept besides."""

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> KVStore:
        """Storage for the keys and values of num_pages * page_size tokens, as floats or as "int8"
        (``backends/int8_pages.py``); ``bounds``, one for each layer, say how large the numbers can become. A backend whose
        pages lie on a device has ``host_kv_store``, too, with the same arguments, for pages that are swapped out."""

    def embed(self, table: Matrix, tokens: Sequence[int]) -> Hidden:
        """Rows of the table: [T] token numbers -> [T, D]."""

    def norm(self, x: Hidden, gain: Vector, epsilon: float) -> Hidden:
        """Root-mean-square norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) * gain, row by row."""

    def norm_heads(self, x: Hidden, gain: Vector, epsilon: float) -> Hidden:
        """The same for each head of a row on its own, a head being as long as the gain."""

    def linear(self, matrix: Matrix, x: Hidden, bias: Vector | None = None) -> Hidden:
        """x @ matrix.T + bias: [T, columns] -> [T, rows]."""

    def split(self, x: Hidden, widths: Sequence[int]) -> list[Hidden]:
        """Cut every row into parts of these widths: [T, sum(widths)] -> one [T, width] for each."""

    def rotate(self, x: Hidden, positions: Sequence[int], frequencies: tuple[float, ...]) -> Hidden:
        """Rotary embedding (``base/rope.py``): in each head turn the pair (2i, 2i + 1) of a row at position p by the
        angle p * frequencies[i]. A head has two numbers for each frequency."""

    def attend(self, q: Hidden, k: Hidden, v: Hidden, layer: int, store: Any, batch: Batch) -> Hidden:
        """Write the batch's keys and values [T, kv_width] into its slots, then let every row's heads look at its
        own request's positions up to its own: softmax(q . k / sqrt(d)) . v, [T, H * d]. Query head h uses
        key/value head h * kv_heads // heads. No slot outside a span's ``context`` is ever read."""

    def swiglu(self, gate: Hidden, up: Hidden) -> Hidden:
        """silu(gate) * up, element by element, silu(z) = z / (1 + exp(-z)) (Shazeer 2020)."""

    def add(self, x: Hidden, y: Hidden) -> Hidden:
        """x + y: the residual connection."""

    def pick(self, x: Hidden, rows: Sequence[int]) -> Hidden:
        """Some rows of x."""

    def logits(self, x: Hidden) -> Sequence[Sequence[float]]:
        """Rows of logits for the sampler: lists, or ``logits.Logits`` where their likeliest tokens are known."""

    def to_lists(self, x: Hidden) -> list[list[float]]:
        """x as lists of Python floats."""


_BACKENDS = {  # name: (where it is, its class; where a plainer one is, if that wing was deleted), package, extra
    "reference": (("backend.ReferenceBackend",), None, None),
    "cpu": (("backends.lanes.backend.LanesBackend", "backend.ReferenceBackend"), None, None),
    "numpy": (("backends.numpy.backend.FastNumpyBackend", "numpy_backend.NumpyBackend"), "numpy", "numpy"),
    "cuda": (("backends.cuda.backend.CudaBackend",), "warp", "cuda"),
}


def load_backend(backend: str | Backend = "auto", **options: Any) -> Backend:
    """Find a backend by name, or pass a ready one through. ``options`` are those of "cuda" (``backends/cuda/backend.py``):
    ``device``, "cuda:0" or "cpu"; ``dtype``, "float32" or "float16". BackendError for an unknown or missing one."""
    if options and backend != "cuda":
        raise BackendError(f"{', '.join(options)} can be chosen for backend 'cuda' only, not for {backend!r}")
    if not isinstance(backend, str):
        missing = [name for name in vars(Backend) if name[0] != "_" and not hasattr(backend, name)]
        if missing:
            raise BackendError(f"{backend!r} is no backend: it has no {', '.join(missing)}")
        return backend
    if backend == "auto":
        backend = "numpy" if find_spec("numpy") else "cpu"
    if backend not in _BACKENDS:
        allowed = ", ".join(map(repr, (*_BACKENDS, "auto")))
        raise BackendError(f"there is no backend {backend!r}; allowed: {allowed}")
    places, package, extra = _BACKENDS[backend]
    if package and not find_spec(package):
        raise BackendError(f"backend {backend!r} needs {package}, which is not installed: pip install '.[{extra}]'")
    for place in places:
        module, _, name = place.rpartition(".")
        try:
            made: Backend = getattr(wing(module, f"backend {backend!r}"), name)(**options)
        except MissingWingError:
            if place == places[-1]:
                raise
        else:
            break
    return made


# -------------------------------------------------------------------------------------------------------- the plain one

#: M1 · The decoder's operations in plain standard-library Python: the form to read first.
#:
#: A hidden state is a list with one row (a list of floats) for each token. Every row is computed on its own and
#: every sum runs in one fixed order, so a request's numbers are bitwise the same alone, in any batch and in any
#: chunking: the guarantee "batch equals solo" needs no further argument here.
#:
#: Weights stay the float32 numbers they were loaded as (4 bytes each), or packed int8/int4; arithmetic is double.


Row = Sequence[float]
Rows = list[list[float]]
FloatMatrix = list["array[float]"]
Matrix = Union[FloatMatrix, QuantizedTensor]


def dot(x: Row, y: Row) -> float:
    """Inner product, summed from left to right (the shorter of the two decides the length)."""
    return sum(map(mul, x, y), 0.0)


class ReferenceBackend:
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
                 kv_quantization: str | None = None) -> Any:
        store: Any = ReferenceKVStore
        if kv_quantization == "int8":
            store = wing("backends.int8_pages", "kv_quantization 'int8'").Int8KVStore
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

    def attend(self, q: Rows, k: Rows, v: Rows, layer: int, store: Any, batch: Batch) -> Rows:
        store.write_layer(layer, batch.slots, k, v)
        parts = [part for span in batch.spans for part in store.parts(span)]
        return [row for part in parts for row in self._attend_part(q, layer, store, part)]

    def _attend_part(self, q: Rows, layer: int, store: Any, part: Span) -> Rows:
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


class ReferenceKVStore:
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

    def copy_page(self, source: int, target: int, origin: ReferenceKVStore | None = None) -> None:
        size, origin = self.page_size, origin or self
        for theirs, ours in ((origin.keys, self.keys), (origin.values, self.values)):
            for layer, head in product(range(self.layers), range(self.kv_heads)):
                page = theirs[layer][head][source * size:(source + 1) * size]
                ours[layer][head][target * size:(target + 1) * size] = page

    def settle(self, page: int) -> None:
        """Nothing is kept besides the page."""
