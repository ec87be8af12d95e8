"""M1 · Read and write llama2.c models (Karpathy 2023), the smallest real checkpoints there are.

The legacy ("version 0") .bin file is a header of seven little-endian int32, followed by float32 only:

    width  ffn_width  layers  heads  kv_heads  vocab_size  max_context     vocab_size < 0: the output is not tied
    embedding [vocab, width]
    of all layers: attention gains, then of all layers: q, then k, v, o, ffn gains, gate (w1), down (w2), up (w3)
    final gains [width]
    cos and sin tables [max_context, head_width / 2] each
    output projection [vocab, width]                                       only if it is not tied

The tables are skipped, as in llama2.c itself: the decoder computes its angles. ``UNSAID`` has what the file does not
say and llama2.c fixes. The tokenizer comes in a second file (``llama2c_tokenizer.py``).
"""

from __future__ import annotations

import struct
from array import array
from itertools import chain
from math import cos, prod, sin
from pathlib import Path

from starter.base.weights import Tensor, Weights, check_weights, float32_array, little_endian, tensor_shapes
from starter.checkpoints.files import open_checkpoint, replace_file
from starter.checkpoints.llama2c_tokenizer import BOS, EOS
from starter.errors import SchemaError
from starter.schema import MODEL_SHAPE, ModelConfig

# llama2.c ends a generation at BOS, which separates its training stories, and a chat at EOS. Here both end a sequence.
UNSAID = {"rope_theta": 10_000.0, "norm_eps": 1e-5, "bos_token": BOS, "eos_tokens": (BOS, EOS), "head_dim": None,
          "attention_bias": False, "qk_norm": False, "rope_scaling": None}

_HEADER = struct.Struct("<7i")
_FIELDS = ("width", "ffn_width", "layers", "heads", "kv_heads", "vocab_size", "max_context")
_LATER_VERSIONS = 0x616B3432  # the first number of their files; in version 0 it is the width
_STACKED = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj")
_TABLES = "(rotary tables)"


def _file_order(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of everything after the header, in the order of the file."""
    stacked = [f"model.layers.{i}.{name}.weight" for name in _STACKED for i in range(config.layers)]
    output = [] if config.tied_output else ["lm_head.weight"]
    shapes = {**tensor_shapes(config), _TABLES: (config.max_context, config.head_width)}
    return {name: shapes[name]
            for name in ("model.embed_tokens.weight", *stacked, "model.norm.weight", _TABLES, *output)}


def read_llama2c(path: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Model file -> configuration and weights. SchemaError that names the file for anything malformed. O(file).

    The header's numbers are compared with the file's size before anything is allocated.
    """
    with open_checkpoint(path) as (file, size):
        config = _parse_header(file.read(_HEADER.size))
        layout = _file_order(config)
        expected = _HEADER.size + 4 * sum(map(prod, layout.values()))
        if size != expected:
            fault = "is cut short" if size < expected else "goes on behind its end"
            raise SchemaError(f"a model of the sizes in its header takes {expected} bytes, and there are {size}: "
                              f"the file {fault}, or is no llama2.c model")
        weights = {name: Tensor(shape, float32_array(file.read(4 * prod(shape)))) for name, shape in layout.items()}
    del weights[_TABLES]
    return config, weights


def _parse_header(raw: bytes) -> ModelConfig:
    if len(raw) < _HEADER.size:
        raise SchemaError(f"not a llama2.c model: the header alone takes {_HEADER.size} bytes, there are {len(raw)}")
    sizes = dict(zip(_FIELDS, _HEADER.unpack(raw)))
    if sizes["width"] == _LATER_VERSIONS:
        raise SchemaError("a llama2.c model of version 1 or later; only version 0 is read: export with --version 0")
    tied = sizes["vocab_size"] > 0
    config: ModelConfig = MODEL_SHAPE.parse(
        {**UNSAID, **sizes, "vocab_size": abs(sizes["vocab_size"]), "tied_output": tied}, "")
    return config


def write_llama2c(path: str | Path, config: ModelConfig, weights: Weights) -> None:
    """Write a model file; ``read_llama2c`` reads the same back. SchemaError for a model that the format cannot hold."""
    check_weights(config, weights)
    for name, value in UNSAID.items():
        if getattr(config, name) != value:
            raise SchemaError(f"llama2.c's format fixes it at {value!r}, not {getattr(config, name)!r}", f"/{name}")
    sizes = [getattr(config, name) for name in _FIELDS]
    sizes[_FIELDS.index("vocab_size")] *= 1 if config.tied_output else -1
    data = (_rotary_tables(config) if name == _TABLES else weights[name].values for name in _file_order(config))
    replace_file(path, chain([_HEADER.pack(*sizes)], map(little_endian, data)))


def _rotary_tables(config: ModelConfig) -> array[float]:
    """cos, then sin, of position * theta ** (-pair / head_width): each [max_context, head_width / 2]."""
    angles = [position * config.rope_theta ** (-pair / config.head_width)
              for position in range(config.max_context) for pair in range(0, config.head_width, 2)]
    return array("f", [*map(cos, angles), *map(sin, angles)])


def find_llama2c(path: str | Path) -> tuple[Path, Path]:
    """The model file and the tokenizer file of a checkpoint. ``path`` is a folder with one .bin file of each (the
    tokenizer's name begins with "tok"), or the model file with its tokenizer beside it. SchemaError otherwise."""
    path = Path(path)
    if not path.exists():
        raise SchemaError(f"there is no file or folder {path}")
    folder = path if path.is_dir() else path.parent
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".bin" and file.is_file())
    tokenizers = [file for file in files if file.name.lower().startswith("tok")]
    models = [file for file in files if file not in tokenizers] if path.is_dir() else [path]
    for kind, found in (("model", models), ("tokenizer", tokenizers)):
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise SchemaError(f"{folder} must hold exactly one llama2.c {kind} file "
                              f"({'tok*.bin' if kind == 'tokenizer' else '*.bin'}), not {names}")
    if path in tokenizers:
        raise SchemaError(f"{path} is a tokenizer by its name; give the model file, or the folder of both")
    return models[0], tokenizers[0]
