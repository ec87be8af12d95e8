"""How fast the engine is, beside named peers in the same run.

    python3 scripts/bench.py --suite stdlib [--shape 260K] [--rounds 7] [--json OUT.json]

Suite ``stdlib``: the default backend, which needs no package, in the two shapes of llama2.c (260,000 and 15 million
parameters) with random weights, beside the same weights in llama2-py (pure Python) and in transformers on PyTorch:

    pip install '.[peers]' '.[oracle]'        a peer that is missing is named, and its column stays empty

Everybody decodes greedily at positions around 128. Rounds alternate between all contestants, so that a machine that
slows down slows all; the median counts, the spread is the middle half, and a ratio is the median of the ratios of each
round. Ours is the whole engine: scheduler, pages, sampling, events.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import mul
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.peers import Llama2Py, Transformers, ungrouped
from starter.backend import load_backend
from starter.console import Console, check_writable, guarded, run_program
from starter.engine import InferenceEngine
from starter.lanes import LaneMatrix
from starter.llama2c import UNSAID, write_llama2c
from starter.loading import Loaded
from starter.model import Model
from starter.quantization import quantize
from starter.schema import CharacterVocabulary, EngineSettings, ModelConfig, QuantizationConfig, SamplingParams
from starter.tokenizer import CharacterTokenizer
from starter.weights import seeded_weights

SHAPES = {
    "260K": ModelConfig(vocab_size=512, width=64, layers=5, heads=8, kv_heads=4, ffn_width=172, max_context=512,
                        tied_output=True, **UNSAID),
    "15M": ModelConfig(vocab_size=32_000, width=288, layers=6, heads=6, kv_heads=6, ffn_width=768, max_context=256,
                       tied_output=True, **UNSAID),
}
INT8 = QuantizationConfig(bits=8, group_size=None)  # a scale a row: the codes go into lanes as they are
PROMPT = 112  # tokens before the measured ones
TOKENS = {"260K": 32, "15M": 8}  # that a contestant decodes in a round
PAGE_SIZE = 64
Run = Callable[[], float]  # one round -> tokens per second


class Ours:
    """Our engine with ``batch`` equal requests in the middle of decoding."""

    def __init__(self, config: ModelConfig, weights: Any, quantization: QuantizationConfig | None, batch: int,
                 tokens: int, backend: str = "cpu", workers: int = 1) -> None:
        self.batch, self.tokens = batch, tokens
        characters = CharacterVocabulary("".join(map(chr, range(0x4E00, 0x4E00 + config.vocab_size))))
        model = Model(config, weights, load_backend(backend), quantization)
        settings = EngineSettings(page_size=PAGE_SIZE, num_pages=batch * 8, max_running=batch, budget_tokens=256,
                                  workers=workers)
        self.engine = InferenceEngine(Loaded(model, CharacterTokenizer(characters), {}), settings)
        self.forward_seconds = self.step_seconds = 0.0
        self._meter()

    def _meter(self) -> None:
        """Time the decoder inside the engine's steps: what is left is the engine's own."""
        forward = self.engine.model.forward

        def timed(batch: Any, store: Any) -> Any:
            start = time.perf_counter()
            logits = forward(batch, store)
            self.forward_seconds += time.perf_counter() - start
            return logits

        self.engine.model.forward = timed  # type: ignore[method-assign]

    def __call__(self) -> float:
        """Tokens per second of all requests together, over steps that only decode."""
        dice = random.Random(1)
        vocabulary = self.engine.model.config.vocab_size
        ids = [self.engine.submit([dice.randrange(vocabulary) for _ in range(PROMPT)], self.tokens + 2,
                                  sampling=SamplingParams(ignore_eos=True)) for _ in range(self.batch)]
        while any(chunk.phase == "prefill" for chunk in self.engine.step().chunks):
            pass
        self.forward_seconds = 0.0
        start = time.perf_counter()
        for _ in range(self.tokens):
            self.engine.step()
        self.step_seconds = time.perf_counter() - start
        for request_id in ids:
            self.engine.cancel(request_id)
            for _ in self.engine.stream(request_id):
                pass
        return self.batch * self.tokens / self.step_seconds

    @property
    def overhead(self) -> float:
        """Share of the last round's steps that was not the decoder."""
        return 1.0 - self.forward_seconds / self.step_seconds


def llama2_py(config: ModelConfig, weights: Any, tokens: int) -> Run:
    """llama2-py at the same positions. Its cost does not depend on the numbers in its cache, so that stays empty."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        write_llama2c(path, *ungrouped(config, weights))
        peer = Llama2Py(path)
    state = peer.module.RunState()
    peer.module.init_run_state(state, peer.config)
    count = max(2, tokens // 8)

    def run() -> float:
        start = time.perf_counter()
        for position in range(PROMPT, PROMPT + count):
            peer.module.transformer(7, position, peer.config, state, peer.weights)
            peer.module.argmax(state.logits)
        return count / (time.perf_counter() - start)

    return run


def transformers(config: ModelConfig, weights: Any, batch: int, tokens: int) -> Run:
    """``generate`` of so many new tokens, less one of a single new token: the prompt is not counted."""
    peer = Transformers(config, weights)
    dice = random.Random(1)
    prompts = peer.torch.tensor([[dice.randrange(2, config.vocab_size) for _ in range(PROMPT)] for _ in range(batch)])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with peer.torch.inference_mode():
            peer.model.generate(prompts, attention_mask=peer.torch.ones_like(prompts), max_new_tokens=count,
                                min_new_tokens=count, do_sample=False, use_cache=True)
        return time.perf_counter() - start

    return lambda: batch * tokens / max(seconds(tokens + 1) - seconds(1), 1e-9)


def measure(contestants: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """One warm-up each, then rounds in turn."""
    results: dict[str, list[float]] = {name: [] for name in contestants}
    with Console(sys.stderr).working() as progress:
        for round_number in range(-1, rounds):
            for name, run in contestants.items():
                progress(f"round {round_number + 1} of {rounds}: {name}")
                value = run()
                if round_number >= 0:
                    results[name].append(value)
    return results


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The middle half and the median between."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def products(rounds: int) -> list[dict[str, Any]]:
    """Nanoseconds of one multiply-accumulate of a matrix times a vector, in a loop over rows and in lanes."""
    table = []
    for rows, columns in ((128, 64), (344, 64), (864, 288), (1536, 288), (2048, 288)):
        dice = random.Random(rows)
        matrix = [[dice.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]
        x = [dice.gauss(0, 1) for _ in range(columns)]
        lanes = LaneMatrix.of_floats(matrix)
        forms: dict[str, Callable[[], object]] = {
            "loop": lambda: [sum(map(mul, row, x)) for row in matrix],  # noqa: B023 - called before the next turn
            "14-bit lanes": lambda: lanes.times(x),  # noqa: B023
        }
        for bits, name in ((8, "int8 lanes"), (4, "int4 lanes")):
            packed = LaneMatrix.of_codes(quantize(matrix, QuantizationConfig(bits, None)))
            forms[name] = lambda packed=packed: packed.times(x)  # type: ignore[misc]  # noqa: B023
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(max(5, rounds)):
            for name, form in forms.items():
                repeats = max(1, 400_000 // (rows * columns))
                start = time.perf_counter()
                for _ in range(repeats):
                    form()
                times[name].append((time.perf_counter() - start) / repeats / rows / columns * 1e9)
        table.append({"rows": rows, "columns": columns,
                      **{name: statistics.median(values) for name, values in times.items()}})
    return table


def stdlib(shapes: Sequence[str], rounds: int) -> dict[str, Any]:
    """The suite: products, then every contestant in each shape."""
    with Console(sys.stderr).working("matrix products ..."):
        report: dict[str, Any] = {"suite": "stdlib", "machine": machine(), "products_ns": products(rounds),
                                  "shapes": {}}
    missing = [name for name, module in (("llama2-py", "llama2_py"), ("transformers", "transformers"))
               if not find_spec(module)]
    report["missing"] = missing
    for shape in shapes:
        config, tokens = SHAPES[shape], TOKENS[shape]
        weights = seeded_weights(config, 1)
        start = time.perf_counter()
        single = Ours(config, weights, None, 1, tokens)
        loading = time.perf_counter() - start
        ours = {"float, batch 1": single, "int8, batch 1": Ours(config, weights, INT8, 1, tokens),
                "float, batch 8": Ours(config, weights, None, 8, tokens // 4),
                "int8, batch 8": Ours(config, weights, INT8, 8, tokens // 4)}
        if cores() > 1:
            ours["int8, batch 8, two processes"] = Ours(config, weights, INT8, 8, tokens // 4, workers=2)
        if shape == "260K":
            ours["reference, batch 1"] = Ours(config, weights, None, 1, 8, "reference")
        contestants: dict[str, Run] = dict(ours)
        if "llama2-py" not in missing:
            contestants["llama2-py"] = llama2_py(config, weights, tokens)
        if "transformers" not in missing:
            contestants["transformers, batch 1"] = transformers(config, weights, 1, tokens)
            contestants["transformers, batch 8"] = transformers(config, weights, 8, tokens)
        results = measure(contestants, rounds)
        report["shapes"][shape] = {
            "load_seconds": loading,
            "bytes_per_weight": (single.engine.model.weight_bytes + single.engine.model.working_bytes)
            / sum(len(tensor.values) for tensor in weights.values()),
            "plan": single.engine.model.backend.plan(),  # type: ignore[attr-defined]
            "tokens_per_second": results,
            "overhead": {name: one.overhead for name, one in ours.items()}}
        for one in ours.values():
            one.engine.close()
    return report


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    versions = {}
    for package in ("llama2-py", "transformers", "torch", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"python": platform.python_version(), "system": platform.platform(), "cores": cores(), "packages": versions}


def show(report: dict[str, Any]) -> None:
    """The tables."""
    about = report["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items() if number)
    print(f"Python {about['python']}, {about['cores']} cores; {packages or 'no packages'}")
    for name in report["missing"]:
        extra = {"llama2-py": "peers", "transformers": "oracle"}[name]
        print(f"{name} is not installed: pip install '.[{extra}]'")
    print("\nns a multiply-accumulate   loop   14-bit lanes   int8 lanes   int4 lanes")
    for row in report["products_ns"]:
        size = f"{row['rows']} x {row['columns']}"
        print(f"{size:24} {row['loop']:6.1f} {row['14-bit lanes']:14.2f} {row['int8 lanes']:12.2f} "
              f"{row['int4 lanes']:12.2f}")
    for shape, found in report["shapes"].items():
        results = found["tokens_per_second"]
        print(f"\n{shape} shape: loaded in {found['load_seconds']:.1f} s, "
              f"{found['bytes_per_weight']:.1f} bytes a weight")
        print(f"{'':32} tokens/s   (middle half)      x llama2-py   x transformers   engine's own time")
        for name, values in results.items():
            low, middle, high = quartiles(values)
            own = found["overhead"].get(name)
            print(f"{name:32} {middle:8.1f}   ({low:8.1f} to {high:8.1f}) {ratio(values, results.get('llama2-py')):>9} "
                  f"{ratio(values, results.get(like_ours(name))):>14} "
                  f"{'' if own is None else f'{own:14.1%}'}".rstrip())


def like_ours(name: str) -> str:
    """The transformers of the same batch."""
    return f"transformers, {'batch 8' if 'batch 8' in name else 'batch 1'}"


def ratio(values: Sequence[float], peer: Sequence[float] | None) -> str:
    """Median of the ratios of each round."""
    return f"{statistics.median(a / b for a, b in zip(values, peer)):.2f}" if peer else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("stdlib",), default="stdlib")
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append", help="one shape alone; the default is both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="OUT.json", help="write all figures there, too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    return guarded(lambda: run(options.shape or tuple(SHAPES), options.rounds, options.json))


def run(shapes: Sequence[str], rounds: int, json_file: str | None) -> int:
    """Measure, show, write."""
    if json_file:
        check_writable(json_file)
    report = stdlib(shapes, rounds)
    show(report)
    if json_file:
        Path(json_file).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_program(main)
