"""Optional · What every reader of checkpoints returns, and the one difference that they have to even out.

    gguf_model.py    a GGUF file                   \\
    hf_model.py      a folder from Hugging Face     }->  Checkpoint(name, config, weights, tokenizer)
    llama2c.py       a llama2.c model              /

The rotary embedding turns pairs of numbers of a head. In our decoder, in llama2.c and in GGUF's llama the two are
neighbours; Hugging Face and GGUF's qwen2 and qwen3 store the first numbers of all pairs, then the second ones:

    a0 b0 a1 b1 a2 b2    neighbours          a0 a1 a2 b0 b1 b2    halves

So ``neighbours`` reorders the rows of the tensors that make queries and keys. The inner products of attention stay the
same, since queries and keys are reordered alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from starter.base.tokenizer import Tokenizer
from starter.base.weights import StoredWeights, Tensor
from starter.quantization import QuantizedTensor
from starter.schema import ModelConfig

Progress = Callable[[str], None]  # called now and then with a line that says what is being done

OF_QUERY_OR_KEY = tuple(f"self_attn.{part}_{kind}" for part in "qk"
                        for kind in ("proj.weight", "proj.bias", "norm.weight"))


@dataclass(frozen=True)
class Checkpoint:
    """A model and its tokenizer, ready for ``model.Model``."""

    name: str
    config: ModelConfig
    weights: StoredWeights
    tokenizer: Tokenizer


def neighbours(tensor: Tensor, head_width: int) -> Tensor:
    """A tensor whose rows (or, of a vector, numbers) belong to heads, reordered from halves to neighbours.
    O(numbers)."""
    return Tensor(tensor.shape, _reordered(tensor.values, tensor.shape[0], head_width))


def neighbour_codes(q: QuantizedTensor, head_width: int) -> QuantizedTensor:
    """``neighbours`` for a matrix of codes. O(bytes)."""
    scales, zero_points, packed = (_reordered(part, q.shape[0], head_width)
                                   for part in (q.scales, q.zero_points, array("B", q.packed)))
    return replace(q, scales=scales, zero_points=zero_points, packed=packed.tobytes())


def _reordered(values: array[Any], rows: int, head_width: int) -> array[Any]:
    size, half = len(values) // rows, head_width // 2
    found = values[:0]
    for head in range(0, rows, head_width):
        for i in range(half):
            for row in (head + i, head + half + i):
                found.extend(values[row * size:(row + 1) * size])
    return found


def counted(names: Iterable[str], progress: Progress, what: str) -> Iterator[str]:
    """The names, with a call of ``progress`` before each."""
    names = list(names)
    for i, name in enumerate(names, start=1):
        progress(f"{what}: tensor {i} of {len(names)}")
        yield name
