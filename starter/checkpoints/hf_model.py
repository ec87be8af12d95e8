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

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starter.base.model_config import MODEL_SHAPE, ModelConfig
from starter.base.rope import ROPE_SCALING_SHAPE
from starter.base.strict_json import Integer, ListOf, MapOf, Text, describe, parse_json, pointer
from starter.base.weights import Tensor, tensor_shapes
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
    "label2id", "problem_type", "is_encoder_decoder", "_attn_implementation", "_attn_implementation_autoset",
    "attn_implementation", "unsloth_fixed", "unsloth_version", "gradient_checkpointing", "auto_map", "tokenizer_class",
    "unk_token_id", "sep_token_id", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p",
}
_OFF: dict[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleaved": False,
                           "use_sliding_window": False, "partial_rotary_factor": 1.0, "use_mrope": False,
                           "torchscript": False, "is_decoder": False, "add_cross_attention": False,
                           "tie_encoder_decoder": False, "use_bfloat16": False}  # these values change nothing
_INDEX = MapOf(Text(1, 255))
_TOKENS = ListOf(Integer(), longest=64)
WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
_OUR_NAMES = {**_FIELDS, "kv_heads": "num_key_value_heads", "tied_output": "tie_word_embeddings",
              "bos_token": "bos_token_id", "eos_tokens": "eos_token_id"}  # ModelConfig's name -> the key, in errors
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_DOCUMENT_BYTES = 4 * 1024 * 1024  # the largest index of known models takes a tenth
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_hf_checkpoint(folder: str | Path, progress: Progress = lambda text: None) -> Checkpoint:
    """The model and the tokenizer in a folder. The weights are float32 in memory. O(files).

    SchemaError that names the file for anything malformed or unknown here; EngineError without the package
    ``tokenizers``."""
    folder = Path(folder)
    ends = _ends(folder)
    config = _config(_document(folder / "config.json"), folder, ends)
    tokenizer = read_folder_tokenizer(folder, config, *_chat_template(folder))
    weights: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder, progress):
        if not name.endswith("rotary_emb.inv_freq"):  # computed from config.json; older files store it, too
            weights[name] = neighbours(tensor, config.head_width) if name.endswith(OF_QUERY_OR_KEY) else tensor
    if config.tied_output and weights.get("lm_head.weight") == weights.get("model.embed_tokens.weight", ()):
        del weights["lm_head.weight"]  # some files store the one matrix twice
    _check_names(config, weights, folder)
    return Checkpoint(folder.resolve().name, config, weights, tokenizer)


def _document(path: Path) -> dict[str, Any]:
    """The JSON object in a file. SchemaError that names the file for anything else."""
    with open_checkpoint(path) as (file, size):
        if size > MAX_DOCUMENT_BYTES:
            raise SchemaError(f"has {size} bytes; at most {MAX_DOCUMENT_BYTES} are read")
        try:
            document = parse_json(file.read().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise SchemaError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
        if not isinstance(document, dict):
            raise SchemaError(f"must hold an object, not {describe(document)}")
        return document


def _check_names(config: ModelConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """SchemaError for a tensor that the model needs and the files lack, or the other way round."""
    needed = tensor_shapes(config)
    if missing := [name for name in needed if name not in weights]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SchemaError(f"{folder}: the tensor {missing[0]}{more}, which config.json demands, is in no file")
    for name in weights:
        if name not in needed and name != "lm_head.weight":  # of that the model has a sentence of its own
            raise SchemaError(f"{folder}: the tensor {name} belongs to no part of the model of config.json")


# -------------------------------------------------------------------------------------------- the configuration


def _config(given: Mapping[str, Any], folder: Path, ends: list[int] | None) -> ModelConfig:
    """``ends``: what generation_config.json says of them; None if it says nothing."""
    try:
        sizes = {**_sizes(given), **({} if ends is None else {"eos_tokens": []})}
        try:
            config: ModelConfig = MODEL_SHAPE.parse(sizes, "")
        except SchemaError as error:  # points at our name of the key
            first, *rest = error.path.split("/")[1:] or [""]
            raise SchemaError(error.problem, "/".join(["", _OUR_NAMES.get(first, first), *rest])
                              if first else "") from None
    except SchemaError as error:
        raise SchemaError(f"{folder / 'config.json'}: {error.problem}", error.path) from None
    try:
        return config if ends is None else replace(config, eos_tokens=tuple(ends))
    except SchemaError as error:
        raise SchemaError(f"{folder / GENERATION}: {error.problem}", "/eos_token_id") from None


def _sizes(given: Mapping[str, Any]) -> dict[str, object]:
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
    tied, ends = given.get("tie_word_embeddings"), given.get("eos_token_id")
    theta, scaling = _rotary(given)
    return {
        **{field: given[key] for field, key in _FIELDS.items()}, **ARCHITECTURES[names[0]],
        "kv_heads": given["num_attention_heads"] if (heads := given.get("num_key_value_heads")) is None else heads,
        "head_dim": given.get("head_dim"),
        "tied_output": False if tied is None else tied, "bos_token": given.get("bos_token_id"),
        "eos_tokens": _list_of(ends), "rope_theta": theta, "rope_scaling": scaling}


def _check_known(key: str, value: object, given: Mapping[str, Any]) -> None:
    """SchemaError for a key that may change the computation in a way that this decoder does not know."""
    if value is None or key in _READ | _HARMLESS or (key in _OFF and value == _OFF[key]):
        return
    if key == "sliding_window" and not given.get("use_sliding_window"):  # without the flag it is not used
        return
    if key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
        return
    raise SchemaError(f"{describe(value)} is not known to this decoder", pointer("", key))


def _list_of(ends: object) -> list[Any]:
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _ends(folder: Path) -> list[int] | None:
    """The tokens that may end a sequence, from generation_config.json; None if it does not say."""
    path = folder / GENERATION
    given = _document(path) if path.is_file() else {}
    if "eos_token_id" not in given:
        return None
    try:
        return list(_TOKENS.parse(_list_of(given["eos_token_id"]), "/eos_token_id"))
    except SchemaError as error:
        raise SchemaError(f"{path}: {error.problem}", error.path) from None


def _rotary(given: Mapping[str, Any]) -> tuple[object, dict[str, object] | None]:
    """theta, and the scaling as a plain document."""
    newer, older = given.get("rope_parameters"), given.get("rope_scaling")
    if newer and older and newer != older:  # transformers 5 drops rope_parameters and the theta in it
        raise SchemaError("is given beside rope_parameters, and differs from it; keep one of the two", "/rope_scaling")
    key = "rope_scaling" if older or newer is None else "rope_parameters"
    rope = given.get(key) or {}
    if not isinstance(rope, dict):
        raise SchemaError(f"must be an object, not {describe(rope)}", pointer("", key))
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", given.get("rope_theta", 10_000.0))
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
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
    """Every tensor of every file. Each file of an index must hold exactly the tensors that the index says."""
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():  # before an index, which may be of shards that were merged: as transformers does
        progress(f"reading {folder / WEIGHTS}")
        yield from read_safetensors(folder / WEIGHTS).items()
        return
    if not index.is_file():
        raise SchemaError(_no_weights(folder))
    try:
        where: dict[str, str] = _INDEX.parse(_document(index).get("weight_map"), "/weight_map")
    except SchemaError as error:
        raise SchemaError(f"{index}: {error.problem}", error.path) from None
    files = sorted(set(where.values()))
    for file in files:
        if Path(file).name != file or file in (".", ".."):
            raise SchemaError(f"{index}: {file!r} is not the name of a file in this folder", "/weight_map")
    if gone := [file for file in files if not (folder / file).is_file()]:
        raise SchemaError(f"{index}: it names {len(files)} files, of which {len(gone)} are not in this folder, the "
                          f"first of them {gone[0]}; download them, too")
    for file in counted(files, progress, f"reading {folder.name}"):
        found = read_safetensors(folder / file)
        listed = {name for name, place in where.items() if place == file}
        if wrong := listed.symmetric_difference(found):
            raise SchemaError(f"{index}: it does not agree with {file} on whether {min(wrong)} is there")
        yield from found.items()


def _no_weights(folder: Path) -> str:
    """The sentence for a folder with a config.json and neither model.safetensors nor an index: what is there."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    begun = f"{folder} has no {WEIGHTS}"

    def found(pattern: str) -> str:
        matching = [name for name in names if re.fullmatch(pattern, name, re.IGNORECASE)]
        return ", ".join(matching[:3]) + (f" and {len(matching) - 3} more" if len(matching) > 3 else "")

    if shards := found(r"model-\d+-of-\d+\.safetensors"):
        return f"{begun} but {shards}, whose index {INDEX} is missing; download it, too"
    if adapters := found(r"adapter_model\..*"):
        return f"{begun} but {adapters}, an adapter of another model; merge the two and give the folder of the result"
    if others := found(r"(.*\.safetensors|.*\.bin|.*\.pth?|.*\.ckpt)"):
        return (f"{begun} but {others}, which is not read; save the model with transformers, "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...), and give the folder that this makes")
    return f"{begun}, nor any other weights; download them into this folder, too"


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
                raise SchemaError(f"has {size} bytes; of a template at most {MAX_TEMPLATE_BYTES} are read")
            template = file.read().decode("utf-8", "replace")
    return template, {key: name for key, name in names.items() if isinstance(name, str)}
