"""M1 · What a model is: the sizes of its decoder, where its weights come from, and how they are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from starter.base.rope import ROPE_SCALING_SHAPE, FactorScaling, RopeScaling, rotary_frequencies
from starter.base.strict_json import (
    Boolean,
    Integer,
    ListOf,
    Nullable,
    Number,
    OneOf,
    Record,
    Tagged,
    Text,
    check_fields,
)
from starter.errors import QuantizationError, SchemaError

MAX_VOCABULARY = 1_000_000
MAX_CONTEXT = 1_048_576
TOKEN_SHAPE = Integer(0, in_file=MAX_VOCABULARY - 1)
SEED_SHAPE = Integer(0, in_file=2**63 - 1)
_SHA256 = Nullable(Text(64, 64))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-shaped decoder (Touvron et al. 2023, "LLaMA").

    ``width`` is the length of a token's hidden vector, split into ``heads`` query heads of ``head_width`` numbers;
    ``kv_heads`` divides ``heads``, and each key/value head serves heads/kv_heads query heads (grouped-query attention,
    Ainslie et al. 2023). ``tied_output`` reuses the embedding as output projection.

    What Llama's successors added: heads of another width than width / heads (``head_dim``), a bias on queries, keys
    and values (``attention_bias``: Qwen2), a norm of each query and key head (``qk_norm``: Qwen3), and slower rotary
    embedding for longer texts (``rope_scaling``: ``base/rope.py``).
    """

    vocab_size: Annotated[int, Integer(1, MAX_VOCABULARY)]
    width: Annotated[int, Integer(2, 65_536)]
    layers: Annotated[int, Integer(1, 1_024)]
    heads: Annotated[int, Integer(1, 1_024)]
    kv_heads: Annotated[int, Integer(1, 1_024)]
    ffn_width: Annotated[int, Integer(1, 262_144)]
    max_context: Annotated[int, Integer(1, MAX_CONTEXT)]
    rope_theta: Annotated[float, Number(1.0, 1e12)] = 10_000.0
    norm_eps: Annotated[float, Number(1e-12, 1.0)] = 1e-5
    tied_output: Annotated[bool, Boolean()] = True
    bos_token: Annotated[int | None, Nullable(TOKEN_SHAPE)] = None
    eos_tokens: Annotated[tuple[int, ...], ListOf(TOKEN_SHAPE, longest=64)] = ()
    head_dim: Annotated[int | None, Nullable(Integer(2, 65_536))] = None
    attention_bias: Annotated[bool, Boolean()] = False
    qk_norm: Annotated[bool, Boolean()] = False
    rope_scaling: Annotated[RopeScaling | None, Nullable(ROPE_SCALING_SHAPE)] = None

    def __post_init__(self) -> None:
        if self.head_dim is None and self.width % self.heads:
            raise SchemaError(f"width {self.width} must be a multiple of heads {self.heads}", "/width")
        if self.heads % self.kv_heads:
            raise SchemaError(f"must divide heads {self.heads}, not be {self.kv_heads}", "/kv_heads")
        if self.head_width % 2:
            name, path = ("width/heads", "/width") if self.head_dim is None else ("head_dim", "/head_dim")
            raise SchemaError(f"{name} = {self.head_width} must be even: rotary embedding turns pairs", path)
        if isinstance(self.rope_scaling, FactorScaling) and len(self.rope_scaling.factors) != self.head_width // 2:
            raise SchemaError(f"must be {self.head_width // 2}, one for each pair of a head, not "
                              f"{len(self.rope_scaling.factors)}", "/rope_scaling/factors")
        for name, tokens in (("bos_token", [self.bos_token]), ("eos_tokens", self.eos_tokens)):
            for token in tokens:
                if token is not None and token >= self.vocab_size:
                    raise SchemaError(f"token {token} is outside the vocabulary of {self.vocab_size}", f"/{name}")

    @property
    def head_width(self) -> int:
        """Numbers in one attention head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def q_width(self) -> int:
        """Numbers in one token's query in one layer: those of all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Numbers in one token's key (or value) in one layer."""
        return self.kv_heads * self.head_width

    @property
    def rope_frequencies(self) -> tuple[float, ...]:
        """Radians that each pair of a head turns from one position to the next, [head_width / 2]."""
        return rotary_frequencies(self.head_width, self.rope_theta, self.rope_scaling)


# The fields of later models are written only where they are used: a plain Llama is written as plainly as ever.
MODEL_SHAPE = Record.of(ModelConfig, sparse=("head_dim", "attention_bias", "qk_norm", "rope_scaling"))


@dataclass(frozen=True)
class SeededWeights:
    """Weights drawn from ``seed`` by ``weights.seeded_weights``; ``sha256`` of their bytes guards against drift."""

    seed: Annotated[int, SEED_SHAPE]
    sha256: Annotated[str | None, _SHA256] = None


@dataclass(frozen=True)
class SafetensorsWeights:
    """Weights in a safetensors file; ``path`` is relative to the scenario file."""

    path: Annotated[str, Text(1, 4_096)]
    sha256: Annotated[str | None, _SHA256] = None


WEIGHTS_SHAPE = Tagged("source", {
    "seeded": Record.of(SeededWeights), "safetensors": Record.of(SafetensorsWeights),
})


@dataclass(frozen=True)
class QuantizationConfig:
    """How to quantize a matrix: ``bits`` 8 or 4, one scale for every ``group_size`` numbers of a row (a shorter last
    group is fine; None: one scale a row), symmetric around zero or with a zero point; ``method`` "nearest" spans each
    group's whole range, "search" looks for the least squared error (``calibration/grid_search.py``)."""

    bits: Annotated[int, Integer(4, 8)] = 8
    group_size: Annotated[int | None, Nullable(Integer(1, in_file=1_048_576))] = 32
    symmetric: Annotated[bool, Boolean()] = True
    method: Annotated[str, OneOf(("nearest", "search"))] = "nearest"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (8, 4):
            raise QuantizationError(f"bits must be 8 or 4, not {self.bits!r}")
        check_fields(self, QuantizationError)


QUANTIZATION_SHAPE = Record.of(QuantizationConfig)
