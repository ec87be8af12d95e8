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
from typing import Any, NamedTuple

from starter.base.model_config import MODEL_SHAPE, ModelConfig
from starter.base.rope import FactorScaling, LinearScaling, RopeScaling
from starter.base.weights import Tensor, tensor_shapes
from starter.checkpoints.checkpoint import OF_QUERY_OR_KEY, Checkpoint, Progress, counted, neighbour_codes, neighbours
from starter.checkpoints.gguf import Gguf, open_gguf
from starter.checkpoints.gguf_blocks import QUANTIZED
from starter.checkpoints.hf_tokenizer import read_gguf_tokenizer
from starter.errors import SchemaError
from starter.quantization import QuantizedTensor

MERGE_PARTS = "merge its parts with llama.cpp's llama-gguf-split --merge, and give the file that this makes"
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)

PAIRS = {"llama": "neighbours", "qwen2": "halves", "qwen3": "halves"}  # order of rotary pairs (``checkpoint.py``)

# Optional parts of the decoder: what an architecture demands (True), does not know (False), or may have (None).
_BIASES: dict[str, bool | None] = {"llama": None, "qwen2": True, "qwen3": False}
_QK_NORM = {"llama": False, "qwen2": False, "qwen3": True}

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


class SplitPart(NamedTuple):
    """A part of a GGUF file that was split, by its name: "model-00001-of-00003.gguf" is number 1 of 3 parts."""

    stem: str
    number: int
    parts: int


def split_part(name: str) -> SplitPart | None:
    """What the name of a file says, if it is that of a part."""
    found = _SPLIT_NAME.fullmatch(name)
    return SplitPart(found[1], int(found[2]), int(found[3])) if found else None


def read_gguf_checkpoint(path: str | Path, progress: Progress = lambda text: None, codes: bool = False) -> Checkpoint:
    """The model and the tokenizer in a file. The weights are float32 in memory; with ``codes``, a Q8_0, Q4_0 or Q4_1
    matrix keeps the codes of the file. O(file).

    SchemaError that names the file for anything malformed or unknown here; EngineError without the package
    ``tokenizers``."""
    with open_gguf(path) as gguf:
        _check_whole(gguf.metadata, Path(path))
        config = _config(gguf)
        _check_names(gguf, config)
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


def _check_whole(metadata: Mapping[str, Any], path: Path) -> None:
    """SchemaError for a part of a split file, with the parts that are not beside it."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return
    number = metadata.get("split.no", 0)
    part, missing = split_part(path.name), ""
    if part and part.parts == count <= 10_000:
        beside = {each.number for file in path.parent.iterdir() if (each := split_part(file.name))
                  and (each.stem, each.parts) == (part.stem, count)}
        gone = [str(i) for i in range(1, count + 1) if i not in beside]
        if gone:
            missing = (f"; of its parts {', '.join(gone[:10])}{' and more' if len(gone) > 10 else ''} "
                       f"{'are' if len(gone) > 1 else 'is'} missing here")
    raise SchemaError(f"this is part {number + 1 if isinstance(number, int) else '?'} of {count} of a split GGUF"
                      f"{missing}; {MERGE_PARTS}")


def _check_names(gguf: Gguf, config: ModelConfig) -> None:
    """SchemaError that names, as the file does, a tensor that is missing or has no place."""
    architecture = gguf.metadata["general.architecture"]
    here = {_our_name(name): name for name in gguf.tensors if name != _ROPE_FACTORS}
    needed = tensor_shapes(config)
    if missing := [_gguf_name(name) for name in needed if name not in here]:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise SchemaError(f"the tensor {missing[0]}{more} missing; a {architecture} of these sizes needs it")
    for ours, name in here.items():
        if ours not in needed:
            raise SchemaError(f"the tensor {name} belongs to no part of a {architecture} of {config.layers} layers")


def _gguf_name(ours: str) -> str:
    """The way back from ``_our_name``."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", ours)
    names = _LAYER_TENSORS if layer else _TENSORS
    wanted = layer[2] if layer else ours
    name = next(name for name, mine in names.items() if mine == wanted)
    return f"blk.{layer[1]}.{name}" if layer else name


def _our_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(.+)", name)
    if layer and layer[2] in _LAYER_TENSORS:
        return f"model.layers.{int(layer[1])}.{_LAYER_TENSORS[layer[2]]}"
    if name not in _TENSORS:
        raise SchemaError(f"the tensor {name} has no place in this decoder")
    return _TENSORS[name]


def _config(gguf: Gguf) -> ModelConfig:
    """Sizes from the metadata; optional parts of the model from the architecture, or the names of the tensors where
    it leaves them open."""
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
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_[qkv]\.bias", name) for name in gguf.tensors)
                          if (biases := _BIASES[architecture]) is None else biases,
        "qk_norm": _QK_NORM[architecture],
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
