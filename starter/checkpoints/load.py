"""Optional · From a path to a model on a backend, and its tokenizer: the format is found out by looking."""

from __future__ import annotations

import re
from pathlib import Path

from starter.backend import Backend, load_backend
from starter.checkpoints.checkpoint import Checkpoint, Progress
from starter.checkpoints.files import kind_of_file
from starter.checkpoints.gguf_model import MERGE_PARTS, read_gguf_checkpoint, split_part
from starter.checkpoints.hf_model import GENERATION, INDEX, WEIGHTS, read_hf_checkpoint
from starter.checkpoints.llama2c import find_llama2c, read_llama2c
from starter.checkpoints.llama2c_tokenizer import read_llama2c_tokenizer
from starter.errors import RequestError, SchemaError
from starter.model import Loaded, Model, about_weights, quantization_config

STORED = "stored"  # quantization that keeps the codes of a GGUF file
KINDS = ("give a GGUF file, a Hugging Face folder (config.json, tokenizer.json and model.safetensors), or a llama2.c "
         "model file with its tok*.bin beside it")
_GGUF_KINDS = ("a GGUF file", "a big-endian GGUF file")
_OF_A_FOLDER = ("config.json", WEIGHTS, INDEX, GENERATION, "tokenizer.json", "tokenizer_config.json")
_PYTORCH = re.compile(r"pytorch_model.*\.bin|consolidated.*|.*\.pth?|.*\.ckpt")


def load_checkpoint_model(path: str | Path, backend: str | Backend, quantization: object = None,
                          progress: Progress = lambda text: None) -> Loaded:
    """The model and the tokenizer in ``path``, which is one of these:

        a GGUF file, or a folder with one GGUF file
        a folder from Hugging Face
        a llama2.c model file with its tokenizer beside it, or a folder with both

    ``quantization`` STORED keeps the codes of a GGUF file. ``progress`` gets a line now and then. SchemaError that
    names the file for anything malformed or unknown; RequestError for STORED without a GGUF file. O(file)."""
    stored = quantization == STORED
    made, config = load_backend(backend), quantization_config(None if stored else quantization)  # fails before a read
    checkpoint = read_checkpoint(Path(path), progress, stored)
    progress(f"loading {checkpoint.name} into backend {made.name}")
    model = Model(checkpoint.config, checkpoint.weights, made, config)
    return Loaded(model, checkpoint.tokenizer, {
        "checkpoint": checkpoint.name, **about_weights(checkpoint.weights, model.quantization)})


def read_checkpoint(path: Path, progress: Progress, codes: bool = False) -> Checkpoint:
    """The checkpoint in a file or folder, in whichever of the three formats it is. SchemaError that says what was
    found where it is none of them."""
    try:
        if not path.exists():
            raise SchemaError(f"there is no file or folder {path}")
    except OSError as error:  # a name that is too long, a folder that cannot be entered
        raise SchemaError(f"cannot open {path}: {error}") from None
    if not path.is_file() and not path.is_dir():
        raise SchemaError(f"{path} is neither a file nor a folder; {KINDS}")
    gguf = _gguf_file(path)
    if gguf is not None:
        return read_gguf_checkpoint(gguf, progress, codes)
    if codes:
        raise RequestError(f"quantization {STORED!r} keeps the codes of a GGUF file, and {path} is none; "
                           "int8 and int4 quantize any weights")
    if (path / "config.json").is_file():
        return read_hf_checkpoint(path, progress)
    if problem := _no_model_in(path) if path.is_dir() else _no_model_file(path):
        raise SchemaError(problem)
    model_file, tokenizer_file = find_llama2c(path)
    config, weights = read_llama2c(model_file)
    return Checkpoint(model_file.name, config, weights, read_llama2c_tokenizer(tokenizer_file, config.vocab_size))


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that is meant by a file or a folder, if one is. A folder's config.json with weights in safetensors
    comes first; without them its one GGUF file is the model."""
    if path.is_file():
        return path if kind_of_file(path) in _GGUF_KINDS else None
    names = _names(path)
    found = [name for name in names if name.lower().endswith(".gguf")]
    if not found or ("config.json" in names and any(name.endswith((".safetensors", INDEX)) for name in names)):
        return None
    if len(found) > 1:
        whole = [split_part(name) for name in found]
        if len({part and (part.stem, part.parts) for part in whole}) == 1 and whole[0]:
            raise SchemaError(f"{path} holds {len(found)} of the {whole[0].parts} parts of {whole[0].stem}, a split "
                              f"GGUF; {MERGE_PARTS}")
        raise SchemaError(f"{path} holds {len(found)} GGUF files, {_listed(found)}; give the path of one of them")
    if (kind := kind_of_file(path / found[0])) not in _GGUF_KINDS:
        raise SchemaError(f"{path / found[0]} is {kind or 'no GGUF file'}: it does not begin with GGUF; "
                          "download it again")
    return path / found[0]


def _no_model_file(path: Path) -> str:
    """Why a file that is no GGUF file is no model; "" if it may be llama2.c's."""
    if path.name in _OF_A_FOLDER and (path.parent / "config.json").is_file():
        return f"{path} is a part of a Hugging Face folder; give the folder, {path.parent}"
    kind = kind_of_file(path)
    if path.suffix == ".safetensors" and kind in ("a safetensors file", "", "a text file"):
        return (f"{path} holds weights alone; give the folder in which it lies with its config.json, or the --fixture "
                "that names it")
    if kind in ("", "a text file") and path.suffix.lower() == ".bin":
        return ""
    if not kind and path.suffix.lower() != ".gguf" and any(name.lower().startswith("tok") and name.endswith(".bin")
                                                           for name in _names(path.parent)):
        return ""
    if not kind:
        return f"{path} is no model file of any known kind; {KINDS}"
    return f"{path} is {kind}, and no model; {KINDS}"


def _no_model_in(folder: Path) -> str:
    """Why a folder without a config.json and a GGUF file holds no model; "" if it may be llama2.c's."""
    names = _names(folder)
    if weights := [name for name in names if name.endswith((".safetensors", INDEX)) or _PYTORCH.fullmatch(name)]:
        return f"{folder} holds {_listed(weights)} and no config.json, which says what they are; download it, too"
    if any(name.lower().endswith(".bin") for name in names):
        return ""
    inside = _listed(names) if names else "no files"
    return f"{folder} holds no model but {inside}; {KINDS}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(file.name for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise SchemaError(f"cannot read the folder {folder}: {error}") from None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
