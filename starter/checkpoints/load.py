"""Optional · From a path to a model on a backend, and its tokenizer: the format is found out by looking."""

from __future__ import annotations

from pathlib import Path

from starter.backend import Backend, load_backend
from starter.checkpoints.checkpoint import Checkpoint, Progress
from starter.checkpoints.files import open_checkpoint
from starter.checkpoints.gguf_model import read_gguf_checkpoint
from starter.checkpoints.hf_model import read_hf_checkpoint
from starter.checkpoints.llama2c import find_llama2c, read_llama2c
from starter.checkpoints.llama2c_tokenizer import read_llama2c_tokenizer
from starter.errors import RequestError, SchemaError
from starter.model import Loaded, Model, about_weights, quantization_config

STORED = "stored"  # quantization that keeps the codes of a GGUF file


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
    """The checkpoint in a file or folder, in whichever of the three formats it is."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    folder = (path / "config.json").is_file()
    if not folder and len(files) == 1 and files[0].is_file() and _begins_with(files[0], b"GGUF"):
        return read_gguf_checkpoint(files[0], progress, codes)
    if codes:
        raise RequestError(f"quantization {STORED!r} keeps the codes of a GGUF file, and {path} is none; "
                           "int8 and int4 quantize any weights")
    if folder:
        return read_hf_checkpoint(path, progress)
    if path.suffix == ".safetensors":
        raise SchemaError(f"{path} holds weights alone; give the folder in which it lies with its config.json, or the "
                          f"--fixture that names it")
    model_file, tokenizer_file = find_llama2c(path)
    config, weights = read_llama2c(model_file)
    return Checkpoint(model_file.name, config, weights, read_llama2c_tokenizer(tokenizer_file, config.vocab_size))


def _begins_with(path: Path, magic: bytes) -> bool:
    with open_checkpoint(path) as (file, _):
        return file.read(len(magic)) == magic
