"""From a checkpoint on disk to a model that can compute, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from starter.backend import Backend, load_backend
from starter.checkpoints.checkpoint import Checkpoint, Progress
from starter.checkpoints.files import open_checkpoint
from starter.checkpoints.gguf_model import read_gguf_checkpoint
from starter.checkpoints.hf_model import read_hf_checkpoint
from starter.checkpoints.llama2c import find_llama2c, read_llama2c
from starter.checkpoints.llama2c_tokenizer import read_llama2c_tokenizer
from starter.errors import RequestError
from starter.model import Loaded, Model, about_weights, quantization_config

STORED = "stored"  # a checkpoint's matrices as the codes that its file holds


def load_checkpoint_model(path: str | Path, backend: str | Backend, quantization: object = None,
                          progress: Progress = lambda text: None) -> Loaded:
    """The model and tokenizer of a llama2.c file with its tokenizer beside it, or of the folder that holds both; of a
    GGUF file, or of the folder that holds one; or of a folder as Hugging Face has it. ``quantization`` STORED keeps a
    GGUF file's own codes. ``progress`` is told, now and then, what is being done."""
    stored = quantization == STORED
    made, config = load_backend(backend), quantization_config(None if stored else quantization)  # wrong ones show now
    checkpoint = read_checkpoint(Path(path), progress, stored)
    progress(f"loading {checkpoint.name} into backend {made.name}")
    model = Model(checkpoint.config, checkpoint.weights, made, config)
    return Loaded(model, checkpoint.tokenizer, {
        "checkpoint": checkpoint.name, **about_weights(checkpoint.weights, model.quantization)})


def read_checkpoint(path: Path, progress: Progress, codes: bool = False) -> Checkpoint:
    """By what the path is."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    folder = (path / "config.json").is_file()
    if not folder and len(files) == 1 and files[0].is_file() and _begins_with(files[0], b"GGUF"):
        return read_gguf_checkpoint(files[0], progress, codes)
    if codes:
        raise RequestError(f"quantization {STORED!r} keeps the codes of a GGUF file, and {path} is none; "
                           "int8 and int4 quantize any weights")
    if folder:
        return read_hf_checkpoint(path, progress)
    model_file, tokenizer_file = find_llama2c(path)
    config, weights = read_llama2c(model_file)
    return Checkpoint(model_file.name, config, weights, read_llama2c_tokenizer(tokenizer_file, config.vocab_size))


def _begins_with(path: Path, magic: bytes) -> bool:
    with open_checkpoint(path) as (file, _):
        return file.read(len(magic)) == magic
