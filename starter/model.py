"""M1 · The decoder, written once over a backend's operations, with keys and values in pages.

``reference.py`` is the same network without a cache; read that first. Here the hidden state x holds one row for
each token of a *batch* (``batch.py``), and attention reads earlier positions from the pages of each row's request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .backend import Backend, KVStore, Matrix, Vector
from .batch import Batch, Piece
from .reference import reference_generate as reference_generate
from .schema import ModelConfig, QuantizationConfig
from .weights import Tensor, check_weights


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer, in the backend's form."""

    attention_norm: Vector
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    ffn_norm: Vector
    gate: Matrix
    up: Matrix
    down: Matrix


# Field of Layer -> name in a checkpoint, after "model.layers.<i>."
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class Model:
    """A decoder with its weights on a backend. ``quantization`` applies to every matrix; norm gains stay float."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], backend: Backend,
                 quantization: QuantizationConfig | None = None) -> None:
        check_weights(config, weights)
        self.config, self.backend, self.quantization = config, backend, quantization
        self._tensors = {name: self._load(tensor) for name, tensor in weights.items()}
        self._shapes = {name: tensor.shape for name, tensor in weights.items()}
        self.embedding = self._tensors["model.embed_tokens.weight"]
        self.final_norm = self._tensors["model.norm.weight"]
        self.head = self.embedding if config.tied_output else self._tensors["lm_head.weight"]
        self.layers = [
            Layer(**{field: self._tensors[f"model.layers.{i}.{name}"] for field, name in LAYER_NAMES.items()})
            for i in range(config.layers)]

    def _load(self, tensor: Tensor) -> Any:
        if len(tensor.shape) == 1:
            return self.backend.vector(tensor)
        return self.backend.matrix(tensor, self.quantization)

    def forward(self, batch: Batch, store: KVStore) -> list[list[float]]:
        """Compute every token of the batch, leave its keys and values in ``store``, and return the logits
        [vocab_size] of each row in ``batch.logit_rows``. The pages behind the batch must be reserved."""
        b, config = self.backend, self.config
        x = b.embed(self.embedding, batch.tokens)                                    # [T, width]
        for i, layer in enumerate(self.layers):
            h = b.norm(x, layer.attention_norm, config.norm_eps)
            q = b.rotate(b.linear(layer.query, h), batch.positions, config.head_width, config.rope_theta)
            k = b.rotate(b.linear(layer.key, h), batch.positions, config.head_width, config.rope_theta)
            v = b.linear(layer.value, h)                                             # k, v: [T, kv_width]
            x = b.add(x, b.linear(layer.output, b.attend(q, k, v, i, store, batch)))
            h = b.norm(x, layer.ffn_norm, config.norm_eps)
            x = b.add(x, b.linear(layer.down, b.swiglu(b.linear(layer.gate, h), b.linear(layer.up, h))))
        if not batch.logit_rows:
            return []
        last = b.norm(b.pick(x, batch.logit_rows), self.final_norm, config.norm_eps)  # [wanted, width]
        return b.to_lists(b.linear(self.head, last))

    def forward_uncached(self, tokens: Sequence[int]) -> list[float]:
        """Logits after ``tokens``, every position computed anew in a throw-away store: the price of no cache."""
        store = self.new_store(num_pages=1, page_size=len(tokens))
        batch = Batch.of([Piece(tokens, start=0, pages=(0,), wants_logits=True)], page_size=len(tokens))
        return self.forward(batch, store)[0]

    def new_store(self, num_pages: int, page_size: int) -> KVStore:
        """Empty storage for keys and values of this model's shape."""
        return self.backend.kv_store(self.config, num_pages, page_size)

    def parameters(self) -> dict[str, list[list[float]]]:
        """All weights as plain floats by checkpoint name (dequantized; a vector becomes a one-row matrix)."""
        return {name: self.backend.rows(tensor) if len(self._shapes[name]) == 2 else self.backend.to_lists([tensor])
                for name, tensor in self._tensors.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight matrices in the form that is computed with (norm gains, a few numbers, aside)."""
        return sum(self.backend.matrix_bytes(tensor) for name, tensor in self._tensors.items()
                   if len(self._shapes[name]) == 2)
