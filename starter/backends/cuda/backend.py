"""Optional · The decoder's operations on an NVIDIA GPU, through Warp (extra ``cuda``).

    engine = InferenceEngine.from_scenario(scenario, load_backend("cuda"))                      the GPU cuda:0
    engine = InferenceEngine.from_scenario(scenario, load_backend("cuda", device="cpu"))        the same kernels, no GPU

The arithmetic is in ``kernels.py``; read that first. Here are the calls, in the order in which ``model.py`` makes them.
Hidden states are arrays [T, columns] that stay on the device. What is copied in a step:

    host -> device    the tokens, their positions, and one array with the block tables
    device -> host    two numbers for each row whose next token is due: the likeliest token and its log-probability;
                      all logits of a row only if the sampler draws from them

Weights and pages are float32 or float16 (``dtype``), or packed codes: int8 and int4 for weights, int8 for pages. The
floats of int8 pages are float32 whatever the dtype, and so are all sums. In float16 pages a key or value beyond 65,504
becomes infinite, which ends its request ("the logits hold NaN or infinity").

A row alone is computed by another kernel than a row among several, with sums in another order. So "batch equals solo"
means equal greedy tokens and logits within 1e-4 here, on int8 pages within 1e-2 where the last bit of a float decides
between two codes.

Executed on the CPU, compiled for sm_89 (``scripts/compile_kernels.py``), not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, Union

import warp as wp

from starter.backend import Backend, Batch, KVBounds
from starter.backends.cuda import kernels
from starter.backends.cuda.device import NUMBERS, Array, Device
from starter.backends.cuda.int8_pages import CudaInt8KVStore
from starter.backends.cuda.matrices import DeviceCodeMatrix, DeviceFloatMatrix, bytes_of
from starter.backends.cuda.pages import CudaKVStore, page_bytes
from starter.backends.int8_pages import page_bytes as int8_page_bytes
from starter.base.weights import StoredWeights, Tensor
from starter.errors import BackendError
from starter.quantization import QuantizedTensor, quantize
from starter.sampling import Choice, Logits
from starter.schema import ModelConfig, QuantizationConfig

DeviceMatrix = Union[DeviceFloatMatrix, DeviceCodeMatrix]
CudaStore = Union[CudaKVStore, CudaInt8KVStore]


class CudaBackend(Backend):
    """The operations as kernels on a device. Scratch memory is planned for steps of up to ``rows`` rows; a larger step
    runs as long as there is memory. ``block`` and ``free_bytes``: see ``device.Device``."""

    name = "cuda"

    def __init__(self, device: str = "cuda:0", dtype: str = "float32", block: int | None = None,
                 free_bytes: int | None = None, rows: int = 512) -> None:
        if dtype not in NUMBERS:
            raise BackendError(f"dtype must be {' or '.join(map(repr, NUMBERS))}, not {dtype!r}")
        self.device, self.dtype, self.planned_rows = Device(device, block, free_bytes), dtype, rows
        self.memory = self.device.memory
        self._turned: tuple[Sequence[int], tuple[float, ...], Array] = [], (), None

    def __reduce__(self) -> Any:
        raise BackendError("backend 'cuda' lives in one process, as its arrays do; take workers=1")

    def expect(self, weights: StoredWeights, quantization: QuantizationConfig | None) -> None:
        self.memory.plan({"weights": sum(
            bytes_of(tensor, quantization, self.dtype) if len(tensor.shape) == 2 else 4 * tensor.shape[0]
            for tensor in weights.values())})

    def matrix(self, tensor: Tensor | QuantizedTensor, quantization: QuantizationConfig | None,
               importance: Sequence[float] | None = None) -> DeviceMatrix:
        if isinstance(tensor, QuantizedTensor):
            return DeviceCodeMatrix(self.device, tensor)
        if quantization:
            return DeviceCodeMatrix(self.device, quantize(tensor.rows(), quantization, importance))
        return DeviceFloatMatrix(self.device, tensor, self.dtype)

    def vector(self, tensor: Tensor) -> Array:
        return self.device.put(list(tensor.values))

    def rows(self, matrix: DeviceMatrix) -> list[list[float]]:
        return self.to_lists(matrix.pick(self._integers(range(matrix.shape[0]))))

    def matrix_bytes(self, matrix: DeviceMatrix) -> int:
        return matrix.nbytes

    def kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                 kv_quantization: str | None = None) -> CudaStore:
        page = page_bytes(model.layers * model.kv_width, page_size, self.dtype) if kv_quantization is None else (
            int8_page_bytes(model.layers, model.kv_heads, model.head_width, page_size))
        scratch = min(self.planned_rows, num_pages * page_size) * scratch_bytes(model)
        self.memory.plan({"K/V pages": num_pages * page, "scratch": scratch})
        return self._store(self.device, model, num_pages, page_size, kv_quantization, scratch)

    def host_kv_store(self, model: ModelConfig, num_pages: int, page_size: int, bounds: Sequence[KVBounds] = (),
                      kv_quantization: str | None = None) -> CudaStore:
        """In the computer's own memory, which the device's account does not count."""
        return self._store(Device("cpu"), model, num_pages, page_size, kv_quantization)

    def _store(self, device: Device, model: ModelConfig, num_pages: int, page_size: int,
               kv_quantization: str | None, scratch: int = 0) -> CudaStore:
        shape = model.layers, model.kv_heads, model.head_width, num_pages, page_size
        return CudaInt8KVStore(device, *shape, scratch) if kv_quantization else CudaKVStore(device, *shape, self.dtype)

    def embed(self, table: DeviceMatrix, tokens: Sequence[int]) -> Array:
        return table.pick(self._integers(tokens))

    def norm(self, x: Array, gain: Array, epsilon: float) -> Array:
        out = self.device.empty(x.shape)
        self.device.blocks(kernels.norm, (x.shape[0], x.shape[1] // len(gain)), x, gain, epsilon, out)
        return out

    def norm_heads(self, x: Array, gain: Array, epsilon: float) -> Array:
        return self.norm(x, gain, epsilon)

    def linear(self, matrix: DeviceMatrix, x: Array, bias: Array | None = None) -> Array:
        out = matrix.times(x)
        if bias is not None:
            self.device.threads(kernels.add_bias, out.shape, out, bias)
        return out

    def split(self, x: Array, widths: Sequence[int]) -> list[Array]:
        return [x[:, end - width:end] for width, end in zip(widths, accumulate(widths))]

    def rotate(self, x: Array, positions: Sequence[int], frequencies: tuple[float, ...]) -> Array:
        out = self.device.empty(x.shape)
        self.device.threads(kernels.rotate, (x.shape[0], x.shape[1] // 2), x, self._turns(positions, frequencies), out)
        return out

    def _turns(self, positions: Sequence[int], frequencies: tuple[float, ...]) -> Array:
        """The angles of a step's rows, kept for its other calls."""
        known_positions, known_frequencies, turns = self._turned
        if (known_positions, known_frequencies) != (positions, frequencies):
            turns = self.device.empty((len(positions), len(frequencies)), wp.vec2)
            self.device.threads(kernels.turns, turns.shape, self._integers(positions),
                                self.device.put(frequencies, wp.float64), turns)
            self._turned = list(positions), frequencies, turns
        return turns

    def attend(self, q: Array, k: Array, v: Array, layer: int, store: CudaStore, batch: Batch) -> Array:
        return store.attend(q, k, v, layer, batch)

    def swiglu(self, gate: Array, up: Array) -> Array:
        return self._each(kernels.swiglu, gate, up)

    def add(self, x: Array, y: Array) -> Array:
        return self._each(kernels.add, x, y)

    def _each(self, kernel: Any, x: Array, y: Array) -> Array:
        out = self.device.empty(x.shape)
        self.device.threads(kernel, x.shape, x, y, out)
        return out

    def pick(self, x: Array, rows: Sequence[int]) -> Array:
        out = self.device.empty((len(rows), x.shape[1]))
        self.device.threads(kernels.forms[kernels.gather, wp.float32], out.shape, x, self._integers(rows), out)
        return out

    def logits(self, x: Array) -> Sequence[Sequence[float]]:
        best = self.device.empty((x.shape[0],), wp.vec2d)
        self.device.blocks(kernels.best_tokens, best.shape, x, best)
        return [Logits(Choice(int(token), logprob), DeviceRow(x, row)) if isfinite(logprob) else x[row].numpy().tolist()
                for row, (token, logprob) in enumerate(best.numpy().tolist())]

    def to_lists(self, x: Any) -> list[list[float]]:
        if isinstance(x, list):  # of vectors
            return [vector.numpy().tolist() for vector in x]
        lists: list[list[float]] = x.numpy().tolist()
        return lists

    def _integers(self, numbers: Sequence[int]) -> Array:
        return self.device.put(list(numbers), wp.int32)


class DeviceRow:
    """A row of logits that stays on the device until it is read."""

    def __init__(self, x: Array, row: int) -> None:
        self._x, self._row = x, row

    def __len__(self) -> int:
        return int(self._x.shape[1])

    def __getitem__(self, index: int | slice) -> Any:
        return self._x[self._row].numpy()[index]

    def tolist(self) -> list[float]:
        """All of it."""
        numbers: list[float] = self[:].tolist()
        return numbers


def scratch_bytes(model: ModelConfig) -> int:
    """The most bytes of hidden states that are alive at a time, for each row of a step: those of a layer and those of
    the layer before that ``Model.forward`` still refers to; then the logits."""
    numbers = 5 * model.width + 4 * model.q_width + 6 * model.kv_width + 4 * model.ffn_width + model.vocab_size
    return 4 * numbers
