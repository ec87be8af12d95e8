"""Optional · From a folder from Hugging Face to a model and its tokenizer (extra ``checkpoints``).

    config.json                      sizes, and everything that changes the computation
    model.safetensors                or several files, and model.safetensors.index.json with the file of each tensor
    tokenizer.json                   read by the package ``tokenizers``
    generation_config.json           the tokens that end an answer (optional)
    chat_template.jinja              how to write a chat (optional; older folders have it in tokenizer_config.json)

Architectures: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM. A key of config.json is read, known to change
nothing, or has a value that switches it off; any other is refused by name: a model is computed as it is meant, or not
at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starter.base.model_config import MODEL_SHAPE, ModelConfig
from starter.base.rope import ROPE_SCALING_SHAPE
from starter.base.strict_json import MapOf, Text, describe, pointer, read_json
from starter.base.weights import Tensor
from starter.checkpoints.checkpoint import OF_QUERY_OR_KEY, Checkpoint, Progress, counted, neighbours
from starter.checkpoints.files import open_checkpoint
from starter.checkpoints.hf_tokenizer import read_folder_tokenizer
from starter.checkpoints.safetensors import read_safetensors
from starter.errors import SchemaError

ARCHITECTURES: dict[str, dict[str, object]] = {  # and what they imply
    "LlamaForCausalLM": {}, "Qwen2ForCausalLM": {"attention_bias": True}, "Qwen3ForCausalLM": {"qk_norm": True}}

_FIELDS = {  # ModelConfig's name -> the key
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "ffn_width": "intermediate_size", "max_context": "max_position_embeddings", "norm_eps": "rms_norm_eps",
}
_READ = {*_FIELDS.values(), "architectures", "num_key_value_heads", "head_dim", "tie_word_embeddings", "bos_token_id",
         "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters"}
_HARMLESS = {  # about training, other programs, or how numbers are stored
    "model_type", "torch_dtype", "dtype", "transformers_version", "transformers.js_config", "_name_or_path",
    "initializer_range", "use_cache", "pad_token_id", "attention_dropout", "is_llama_config", "max_window_layers",
    "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label",
    "label2id", "problem_type", "is_encoder_decoder", "_attn_implementation_autoset", "unsloth_fixed",
}
_OFF: dict[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleaved": False,
                           "use_sliding_window": False, "partial_rotary_factor": 1.0}  # these values change nothing
_INDEX = MapOf(Text(1, 255))
MAX_TEMPLATE_BYTES = 1024 * 1024
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_hf_checkpoint(folder: str | Path, progress: Progress = lambda text: None) -> Checkpoint:
    """The model and the tokenizer in a folder. The weights are float32 in memory. O(files).

    SchemaError that names the file for anything malformed or unknown here; EngineError without the package
    ``tokenizers``."""
    folder = Path(folder)
    config = _config(_document(folder / "config.json"), folder)
    tokenizer = read_folder_tokenizer(folder, config, *_chat_template(folder))
    weights: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder, progress):
        if not name.endswith("rotary_emb.inv_freq"):  # computed from config.json; older files store it, too
            weights[name] = neighbours(tensor, config.head_width) if name.endswith(OF_QUERY_OR_KEY) else tensor
    if config.tied_output and weights.get("lm_head.weight") == weights.get("model.embed_tokens.weight", ()):
        del weights["lm_head.weight"]  # some files store the one matrix twice
    return Checkpoint(folder.resolve().name, config, weights, tokenizer)


def _document(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    document = read_json(path)
    if not isinstance(document, dict):
        raise SchemaError(f"{path} must hold an object, not {describe(document)}")
    return document


# -------------------------------------------------------------------------------------------- the configuration


def _config(given: Mapping[str, Any], folder: Path) -> ModelConfig:
    try:
        config: ModelConfig = MODEL_SHAPE.parse(_sizes(given, folder), "")
    except SchemaError as error:
        raise SchemaError(f"{folder / 'config.json'}: {error.problem}", error.path) from None
    return config


def _sizes(given: Mapping[str, Any], folder: Path) -> dict[str, object]:
    """A ModelConfig as a plain document."""
    names = given.get("architectures")
    if names not in [[name] for name in ARCHITECTURES]:
        raise SchemaError(f"must be a list of one of {', '.join(ARCHITECTURES)}, not {names!r}", "/architectures")
    assert isinstance(names, list)
    for key, value in given.items():
        _check_known(key, value, given)
    for key in (*_FIELDS.values(), *(["head_dim"] if names[0] == "Qwen3ForCausalLM" else [])):
        if given.get(key) is None:
            raise SchemaError("this key is required and missing", pointer("", key))
    bos_token, eos_tokens = _ends(given, folder)
    theta, scaling = _rotary(given)
    return {
        **{field: given[key] for field, key in _FIELDS.items()}, **ARCHITECTURES[names[0]],
        "kv_heads": given["num_attention_heads"] if (heads := given.get("num_key_value_heads")) is None else heads,
        "head_dim": given.get("head_dim"),
        "tied_output": given.get("tie_word_embeddings", False), "bos_token": bos_token, "eos_tokens": eos_tokens,
        "rope_theta": theta, "rope_scaling": scaling}


def _check_known(key: str, value: object, given: Mapping[str, Any]) -> None:
    """SchemaError for a key that may change the computation in a way that this decoder does not know."""
    if value is None or key in _READ | _HARMLESS or (key in _OFF and value == _OFF[key]):
        return
    if key == "sliding_window" and given.get("use_sliding_window") is False:
        return
    if key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
        return
    raise SchemaError(f"{describe(value)} is not known to this decoder", pointer("", key))


def _ends(given: Mapping[str, Any], folder: Path) -> tuple[object, list[object]]:
    """The token that begins a sequence, and those that may end one: from generation_config.json if there is one."""
    path = folder / "generation_config.json"
    ends = (_document(path) if path.is_file() else {}).get("eos_token_id", given.get("eos_token_id"))
    return given.get("bos_token_id"), ends if isinstance(ends, list) else [] if ends is None else [ends]


def _rotary(given: Mapping[str, Any]) -> tuple[object, dict[str, object] | None]:
    """theta, and the scaling as a plain document."""
    key = "rope_parameters" if given.get("rope_parameters") is not None else "rope_scaling"
    rope = given.get(key) or {}
    if not isinstance(rope, dict):
        raise SchemaError(f"must be an object, not {describe(rope)}", pointer("", key))
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", given.get("rope_theta", 10_000.0))
    kinds = [rope.pop(name) for name in ("rope_type", "type") if name in rope] or ["default"]
    if kinds[0] == "default" and not rope:
        return theta, None
    if kinds[0] not in ("linear", "llama3"):
        more = f" with {', '.join(rope)}" if rope else ""
        raise SchemaError(f"the type {kinds[0]!r}{more} is not known to this decoder; linear and llama3 are",
                          pointer("", key))
    if "original_max_position_embeddings" in rope:
        rope["original_context"] = rope.pop("original_max_position_embeddings")
    ROPE_SCALING_SHAPE.parse({"kind": kinds[0], **rope}, pointer("", key))  # an error points at the file's own key
    return theta, {"kind": kinds[0], **rope}


# -------------------------------------------------------------------------------------------- tensors, template


def _tensors(folder: Path, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every file. Each file must hold exactly the tensors that the index says."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        progress(f"reading {folder / 'model.safetensors'}")
        yield from read_safetensors(folder / "model.safetensors").items()
        return
    try:
        where: dict[str, str] = _INDEX.parse(_document(index).get("weight_map"), "/weight_map")
    except SchemaError as error:
        raise SchemaError(f"{index}: {error.problem}", error.path) from None
    for file in counted(sorted(set(where.values())), progress, f"reading {folder.name}"):
        if Path(file).name != file or file in (".", ".."):
            raise SchemaError(f"{index}: {file!r} is not the name of a file in this folder", "/weight_map")
        found = read_safetensors(folder / file)
        listed = {name for name, place in where.items() if place == file}
        if wrong := listed.symmetric_difference(found):
            raise SchemaError(f"{index}: it does not agree with {file} on whether {min(wrong)} is there")
        yield from found.items()


def _chat_template(folder: Path) -> tuple[object, dict[str, str]]:
    """The folder's chat template, from the newer place or the older one, and the names of tokens that it may use."""
    path = folder / "tokenizer_config.json"
    settings = _document(path) if path.is_file() else {}
    names = {key: settings[key] for key in _NAMED_TOKENS if key in settings}
    names = {key: name.get("content") if isinstance(name, Mapping) else name for key, name in names.items()}
    template: object = settings.get("chat_template")
    path = folder / "chat_template.jinja"
    if path.is_file():
        with open_checkpoint(path) as (file, size):
            if size > MAX_TEMPLATE_BYTES:
                raise SchemaError(f"{path} has {size} bytes; of a template at most {MAX_TEMPLATE_BYTES} are read")
            template = file.read().decode("utf-8", "replace")
    return template, {key: name for key, name in names.items() if isinstance(name, str)}
