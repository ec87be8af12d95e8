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

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from .batch import Batch
from .errors import BackendError
from .quantization import QuantizedTensor
from .schema import ModelConfig, QuantizationConfig
from .weights import Tensor

Hidden = Any  # [T, columns], the backend's own type
Matrix = Any  # [rows, columns], the backend's own type
Vector = Any  # [columns], the backend's own type


class KVStore(Protocol):
    """The numbers inside the pages. The page manager says which page; the store never asks whose it is.

    A token's key is ``width`` = layers * kv_heads * head_width numbers, layer after layer; its value likewise.

    A store on a device may have ``reserve_tails(count)``, which is told for how many tails to take memory, or refuses.
    """

    width: int
    page_bytes: int  # of one page, keys and values of all layers
    tail_bytes: int  # held besides a page until it is settled; 0 for pages of floats
    peak_tails: int  # the most of these held at a time

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Put one token's key and value into a slot."""

    def read(self, page: int, offset: int) -> tuple[list[float], list[float]]:
        """The key and the value in a slot."""

    def copy_page(self, source: int, target: int, origin: Any = None) -> None:
        """Copy all slots of a page, for copy-on-write; from the pages of another store of the same kind and shape
        (``origin``) when swapping."""

    def settle(self, page: int) -> None:
        """The page is full and will not be computed again, or nobody uses it: drop what was kept besides it."""


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
        (``int8_pages.py``); ``bounds``, one for each layer, say how large the numbers can become. A backend whose
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
        """Rotary embedding (``rotary.py``): in each head turn the pair (2i, 2i + 1) of a row at position p by the
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


_BACKENDS = {  # name: (module, class, package it needs, extra that installs the package)
    "reference": ("cpu_backend", "CpuBackend", None, None),
    "cpu": ("lane_backend", "LaneBackend", None, None),
    "numpy": ("numpy_backend", "NumpyBackend", "numpy", "numpy"),
    "cuda": ("cuda_backend", "CudaBackend", "warp", "cuda"),
}


def load_backend(backend: str | Backend = "auto", **options: Any) -> Backend:
    """Find a backend by name, or pass a ready one through. ``options`` are those of "cuda" (``cuda_backend.py``):
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
    module, name, package, extra = _BACKENDS[backend]
    if not find_spec(f".{module}", __package__):  # in a student's project
        raise BackendError(f"backend {backend!r} is not part of this project; take another one")
    if package and not find_spec(package):
        raise BackendError(f"backend {backend!r} needs {package}, which is not installed: pip install '.[{extra}]'")
    made: Backend = getattr(import_module(f".{module}", __package__), name)(**options)
    return made
