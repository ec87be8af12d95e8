"""Optional · From a GGUF file to a model and its tokenizer (extra ``checkpoints``).

    read_gguf_checkpoint("SmolLM2-135M-Instruct.Q4_1.gguf")

Architectures: llama, qwen2, qwen3. Any other metadata about the architecture, and any tensor without a place in the
decoder, are refused by name: a model is computed as it is meant, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starter.base.model_config import MODEL_SHAPE, ModelConfig
from starter.base.rope import FactorScaling, LinearScaling, RopeScaling
from starter.base.weights import Tensor
from starter.checkpoints.checkpoint import OF_QUERY_OR_KEY, Checkpoint, Progress, counted, neighbour_codes, neighbours
from starter.checkpoints.gguf import Gguf, open_gguf
from starter.checkpoints.gguf_blocks import QUANTIZED
from starter.checkpoints.hf_tokenizer import read_gguf_tokenizer
from starter.errors import SchemaError
from starter.quantization import QuantizedTensor

PAIRS = {"llama": "neighbours", "qwen2": "halves", "qwen3": "halves"}  # order of rotary pairs (``checkpoint.py``)

_FIELDS = {  # ModelConfig's name -> the key, after "llama."
    "width": "embedding_length", "layers": "block_count", "heads": "attention.head_count",
    "ffn_width": "feed_forward_length", "max_context": "context_length", "norm_eps": "attention.layer_norm_rms_epsilon",
}
_READ = {*_FIELDS.values(), "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
         "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}
_HARMLESS = {"rope.scaling.original_context_length", "rope.scaling.finetuned"}  # they explain a linear factor
_OFF = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "attention.causal": True}

_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight"}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight", "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{part}.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf_checkpoint(path: str | Path, progress: Progress = lambda text: None, codes: bool = False) -> Checkpoint:
    """The model and the tokenizer in a file. The weights are float32 in memory; with ``codes``, a Q8_0, Q4_0 or Q4_1
    matrix keeps the codes of the file. O(file).

    SchemaError that names the file for anything malformed or unknown here; EngineError without the package
    ``tokenizers``."""
    with open_gguf(path) as gguf:
        config = _config(gguf)
        tokenizer = read_gguf_tokenizer(gguf.metadata, config)
        halves = PAIRS[gguf.metadata["general.architecture"]] == "halves"
        weights: dict[str, Tensor | QuantizedTensor] = {}
        for name in counted(gguf.tensors, progress, f"reading {Path(path).name}"):
            if name != _ROPE_FACTORS:
                ours = _our_name(name)
                reorder = halves and ours.endswith(OF_QUERY_OR_KEY)
                if codes and gguf.tensors[name].kind in QUANTIZED and len(gguf.tensors[name].shape) == 2:
                    q = gguf.quantized(name)
                    weights[ours] = neighbour_codes(q, config.head_width) if reorder else q
                else:
                    tensor = gguf.tensor(name)
                    weights[ours] = neighbours(tensor, config.head_width) if reorder else tensor
    return Checkpoint(Path(path).name, config, weights, tokenizer)


def _our_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer and layer[2] in _LAYER_TENSORS:
        return f"model.layers.{int(layer[1])}.{_LAYER_TENSORS[layer[2]]}"
    if name not in _TENSORS:
        raise SchemaError(f"the tensor {name} has no place in this decoder")
    return _TENSORS[name]


def _config(gguf: Gguf) -> ModelConfig:
    """Sizes from the metadata; optional parts of the model from the names of the tensors."""
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in PAIRS:
        raise SchemaError(f"the architecture is {_short(architecture)}; {', '.join(PAIRS)} are known")
    prefix = f"{architecture}."
    values = {key[len(prefix):]: value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    for key, value in values.items():
        if key not in _READ | _HARMLESS and (key not in _OFF or value != _OFF[key]):
            raise SchemaError(f"{prefix}{key} is {_short(value)}, which this decoder does not know")
    for key in (*(prefix + key for key in _FIELDS.values()), "token_embd.weight"):
        if key not in gguf.metadata and key not in gguf.tensors:
            raise SchemaError(f"{key} is missing")
    heads = values["attention.head_count"]
    sizes = {
        **{field: values[key] for field, key in _FIELDS.items()},
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "kv_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length"),
        "rope_theta": values.get("rope.freq_base", 10_000.0),
        "tied_output": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors,
        **_ends(gguf.metadata),
    }
    made: ModelConfig = MODEL_SHAPE.parse(sizes, "")
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, made.head_width) != made.head_width:
            raise SchemaError(f"{prefix}{key} is {_short(values[key])}; only the width of a head, {made.head_width}, "
                              "is computed here")
    return _scaled(made, _scaling(gguf, values))


def _ends(metadata: Mapping[str, Any]) -> dict[str, object]:
    """The token that begins a sequence, and those that may end one."""
    ends = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")
            if f"tokenizer.ggml.{name}_token_id" in metadata]
    return {"bos_token": metadata.get("tokenizer.ggml.bos_token_id"), "eos_tokens": list(dict.fromkeys(ends))}


def _scaling(gguf: Gguf, values: Mapping[str, Any]) -> RopeScaling | None:
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    kind = values.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind not in ("none", "linear"):
        raise SchemaError(f"rope.scaling.type is {kind!r}; 'none' and 'linear' are known, and a tensor {_ROPE_FACTORS}")
    if _ROPE_FACTORS in gguf.tensors:
        if kind == "linear":
            raise SchemaError(f"a linear rope.scaling and {_ROPE_FACTORS} cannot be combined here")
        return FactorScaling(tuple(gguf.tensor(_ROPE_FACTORS).values))
    if kind == "none":
        return None
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise SchemaError(f"rope.scaling.factor must be a positive number, not {_short(factor)}")
    return LinearScaling(float(factor))


def _scaled(config: ModelConfig, scaling: RopeScaling | None) -> ModelConfig:
    """The same model with slower rotary embedding, checked again."""
    scaled: ModelConfig = MODEL_SHAPE.parse(MODEL_SHAPE.dump(replace(config, rope_scaling=scaling)), "")
    return scaled


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
