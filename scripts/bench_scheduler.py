"""What a decode-only step of the scheduler costs, beside nano-vllm's scheduler and block manager in the same run.

    python3 scripts/bench_scheduler.py [--json]

Both plan and account for one token of every running request, pages of 16 tokens, 100,000 of them, prompts of 20
tokens, no model; prefix hashing off and on. Where 100,000 waiting are named, as many requests wait behind the running
ones. Steps alternate between the two; the median of 128 steps counts, after 8 to warm up, and the spread is the middle
half. The peer is the PyPI package nano-vllm-fork (pip install --no-deps nano-vllm-fork xxhash numpy), used here alone;
without it the table has our columns only, and says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from starter.base.console import Console
from starter.kv_cache import KVCacheManager
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import Request

PAGES, PAGE_SIZE, PROMPT, MAX_TOKENS = 100_000, 16, 20, 300
WARM_UP, STEPS = 8, 128
Step = Callable[[], object]


def prompt(i: int) -> list[int]:
    """Prompts that share no page."""
    return [(i * 7919 + j * 104_729) % 32_000 for j in range(PROMPT)]


def our_step(running: int, hashing: bool, waiting: int) -> Step:
    """A scheduler whose ``running`` requests all decode."""
    kv = KVCacheManager(PAGES, PAGE_SIZE, prefix_sharing=hashing)
    scheduler = ContinuousBatchScheduler(max_running=running, kv=kv)
    for i in range(running + waiting):
        scheduler.submit(Request(f"r{i}", prompt(i), MAX_TOKENS))
        scheduler.sequence(f"r{i}").tokens += [i] * MAX_TOKENS  # what it will generate
    while any(chunk.phase == "prefill" for chunk in scheduler.step(10**6).chunks):
        pass
    return lambda: scheduler.step(10**6)


def nano_step(running: int, hashing: bool) -> Step:
    """The same for nano-vllm: schedule, then postprocess with one token for each sequence."""
    scheduler_module, sequence_module = import_nano()
    config = types.SimpleNamespace(max_num_seqs=running, max_num_batched_tokens=10**9, eos=-1,
                                   num_kvcache_blocks=PAGES, kvcache_block_size=PAGE_SIZE)
    sequence_module.Sequence.block_size = PAGE_SIZE
    scheduler = scheduler_module.Scheduler(config)
    if not hashing:  # any constant-time key in place of the hash of a block's tokens
        keys = iter(range(10**9))
        scheduler.block_manager.compute_hash = lambda token_ids, prefix=-1: next(keys)
    parameters = sys.modules["nanovllm.sampling_params"].SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for i in range(running):
        scheduler.add(sequence_module.Sequence(prompt(i), parameters))

    def step() -> None:
        sequences, _ = scheduler.schedule()
        scheduler.postprocess(sequences, [5] * len(sequences))

    step()
    return step


def import_nano() -> tuple[types.ModuleType, types.ModuleType]:
    """Its scheduler and sequence modules, without its __init__ and config, which import a GPU stack."""
    if "nanovllm.config" not in sys.modules:
        spec = find_spec("nanovllm")
        assert spec and spec.submodule_search_locations
        package = types.ModuleType("nanovllm")
        package.__path__ = list(spec.submodule_search_locations)
        config = types.ModuleType("nanovllm.config")
        config.Config = types.SimpleNamespace  # type: ignore[attr-defined]
        sys.modules.update({"nanovllm": package, "nanovllm.config": config})
    from nanovllm.engine import scheduler, sequence  # type: ignore[import-not-found]
    return scheduler, sequence


def measure(steps: dict[str, Step], running: int) -> dict[str, dict[str, float]]:
    """Microseconds a running request, median and middle half, the contestants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARM_UP + STEPS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= WARM_UP:
                times[name].append((time.perf_counter() - start) / running * 1e6)
    return {name: dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4)))
            for name, values in times.items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    peer = find_spec("nanovllm") is not None
    peer_name = f"nano-vllm-fork {version('nano-vllm-fork')}" if peer else "not installed: pip install --no-deps " \
        "nano-vllm-fork xxhash numpy"
    console = Console(sys.stderr)
    rows: list[dict[str, Any]] = []
    for running, waiting in ((64, 0), (512, 0), (4096, 0), (512, 100_000)):
        for hashing in (False, True):
            with console.working(f"{running} running, {waiting} waiting, prefix hashing {'on' if hashing else 'off'}"):
                steps = {"ours": our_step(running, hashing, waiting)}
                if peer and not waiting:
                    steps["nano"] = nano_step(running, hashing)
                rows.append({"running": running, "waiting": waiting, "prefix_hashing": hashing,
                             **measure(steps, running)})
    if as_json:
        print(json.dumps({"python": platform.python_version(), "peer": peer_name, "unit": "us per running request",
                          "rows": rows}))
        return 0
    print(f"Python {platform.python_version()}; peer: {peer_name}; microseconds a running request and step")
    print("running  waiting  prefix   ours (middle half)     nano (middle half)     ratio")
    for row in rows:
        ours, nano = row["ours"], row.get("nano")
        cells = "".join(f"{r['median']:6.2f} ({r['low']:.2f}-{r['high']:.2f})".ljust(23) for r in (ours, nano) if r)
        ratio = f"{ours['median'] / nano['median']:.2f}" if nano else ""
        print(f"{row['running']:7}  {row['waiting']:7}  {'on ' if row['prefix_hashing'] else 'off'}   {cells}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
