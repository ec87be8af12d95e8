"""M1 · From a scenario or a checkpoint on disk to a model that can compute, and its tokenizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .backend import Backend, load_backend
from .errors import RequestError
from .llama2c import find_llama2c, read_llama2c
from .model import Model
from .safetensors import read_safetensors
from .schema import (
    TOKENIZER_SHAPE,
    WEIGHTS_SHAPE,
    QuantizationConfig,
    SafetensorsWeights,
    Scenario,
    SeededWeights,
)
from .tokenizer import CharacterTokenizer, Tokenizer, read_llama2c_tokenizer
from .weights import StoredWeights, Weights, check_digest, open_checkpoint, seeded_weights, weights_digest

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Progress

AS_IN_SCENARIO = "as in the scenario"
STORED = "stored"  # a checkpoint's matrices as the codes that its file holds


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and what a timeline's header should say about them."""

    model: Model
    tokenizer: Tokenizer
    about: dict[str, object]


def load_scenario_model(scenario: Scenario, backend: str | Backend, quantization: object = AS_IN_SCENARIO,
                        weights_seed: int | None = None) -> Loaded:
    """The model of a scenario; ``weights_seed`` draws other weights than the scenario names."""
    source = scenario.weights if weights_seed is None else SeededWeights(weights_seed)
    weights = scenario_weights(scenario, source)
    config = scenario.quantization if quantization == AS_IN_SCENARIO else quantization_config(quantization)
    model = Model(scenario.model, weights, load_backend(backend), config)
    tokenizer = CharacterTokenizer(scenario.tokenizer, scenario.model.bos_token, scenario.model.eos_tokens)
    return Loaded(model, tokenizer, {
        "scenario": scenario.name, "weights": WEIGHTS_SHAPE.dump(source),
        "tokenizer": TOKENIZER_SHAPE.dump(scenario.tokenizer), **_about(weights, config)})


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
        "checkpoint": checkpoint.name, **_about(checkpoint.weights, model.quantization)})


def read_checkpoint(path: Path, progress: Progress, codes: bool = False) -> Checkpoint:
    """By what the path is. The readers of the extra ``checkpoints`` are imported only where they are needed."""
    from .checkpoint import Checkpoint
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    folder = (path / "config.json").is_file()
    if not folder and len(files) == 1 and files[0].is_file() and _begins_with(files[0], b"GGUF"):
        from .gguf_checkpoint import read_gguf_checkpoint
        return read_gguf_checkpoint(files[0], progress, codes)
    if codes:
        raise RequestError(f"quantization {STORED!r} keeps the codes of a GGUF file, and {path} is none; "
                           "int8 and int4 quantize any weights")
    if folder:
        from .hf_checkpoint import read_hf_checkpoint
        return read_hf_checkpoint(path, progress)
    model_file, tokenizer_file = find_llama2c(path)
    config, weights = read_llama2c(model_file)
    return Checkpoint(model_file.name, config, weights, read_llama2c_tokenizer(tokenizer_file, config.vocab_size))


def _begins_with(path: Path, magic: bytes) -> bool:
    with open_checkpoint(path) as (file, _):
        return file.read(len(magic)) == magic


def _about(weights: StoredWeights, quantization: QuantizationConfig | None) -> dict[str, object]:
    return {"weights_sha256": weights_digest(weights), "quantization": asdict(quantization) if quantization else None}


def quantization_config(quantization: object) -> QuantizationConfig | None:
    """None, "int8", "int4", "int4-search" or a ready config -> config; "stored" is for checkpoints."""
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    named = {"int8": QuantizationConfig(bits=8), "int4": QuantizationConfig(bits=4),
             "int4-search": QuantizationConfig(bits=4, symmetric=False, method="search")}
    if not isinstance(quantization, str) or quantization not in named:
        raise RequestError(f"quantization must be None, {', '.join(map(repr, named))} or a QuantizationConfig, "
                           f"not {quantization!r}")
    return named[quantization]


def scenario_weights(scenario: Scenario, source: SeededWeights | SafetensorsWeights) -> Weights:
    """The weights a scenario names, checked against the sha256 it records."""
    if isinstance(source, SeededWeights):
        weights: Weights = seeded_weights(scenario.model, source.seed)
    else:
        weights = read_safetensors(scenario.folder / source.path)
    check_digest(weights, source.sha256)
    return weights
