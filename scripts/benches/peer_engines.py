"""Other engines (``scripts/peers.py``) in the benchmarks: each decodes at the same positions as ours, and is timed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from scripts.benches.engines import PROMPT, random_prompts
from scripts.benches.rounds import Run
from scripts.peers import Llama2Py, LlamaCpp, Transformers, Weights, ungrouped
from starter.base.wings import wing
from starter.schema import ModelConfig

COMMANDS = {"llama2-py": "pip install '.[peers]'", "transformers": "pip install '.[oracle]'",
            "llama-cpp-python": "pip install llama-cpp-python"}


def llama2_py(config: ModelConfig, weights: Weights, tokens: int) -> Run:
    """llama2-py at the same positions. Its cost does not depend on the numbers in its cache, so that stays empty."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        wing("checkpoints.llama2c", "llama2-py").write_llama2c(path, *ungrouped(config, weights))
        peer = Llama2Py(path)
    state = peer.module.RunState()
    peer.module.init_run_state(state, peer.config)

    def run() -> float:
        start = perf_counter()
        for position in range(PROMPT, PROMPT + tokens):
            peer.module.transformer(7, position, peer.config, state, peer.weights)
            peer.module.argmax(state.logits)
        return tokens / (perf_counter() - start)

    return run


def transformers(config: ModelConfig, weights: Weights, batch: int, tokens: int) -> Run:
    """A static batch."""
    return generating(Transformers(config, weights, "sdpa"), batch, tokens)


def generating(peer: Transformers, batch: int, tokens: int, prompt: int = PROMPT) -> Run:
    """``generate`` of ``tokens`` new tokens, minus the time for a single new token: the prompt does not count."""
    prompts = random_prompts(batch, prompt, peer.model.config.vocab_size)

    def seconds(count: int) -> float:
        start = perf_counter()
        peer.generate(prompts, count)
        return perf_counter() - start

    return lambda: batch * tokens / max(seconds(tokens + 1) - seconds(1), 1e-9)


def decoding(peer: LlamaCpp, batch: int, tokens: int, prompt: int, vocabulary: int) -> Run:
    """llama.cpp with ``batch`` sequences in a batch."""
    prompts = random_prompts(batch, prompt, vocabulary)

    def run() -> float:
        peer.forget()
        latest = [peer.prefill(i, each) for i, each in enumerate(prompts)]
        start = perf_counter()
        for position in range(prompt, prompt + tokens):
            latest = peer.step(latest, position)
        return batch * tokens / (perf_counter() - start)

    return run


def prefilling(first_token: Callable[[Sequence[int]], object], length: int, vocabulary: int) -> Run:
    """Tokens of a prompt per second, up to the first new one."""
    prompt = random_prompts(1, length, vocabulary)[0]

    def run() -> float:
        start = perf_counter()
        first_token(prompt)
        return length / (perf_counter() - start)

    return run
