"""How the suites measure: contestants take turns, and a figure is a median with the spread beside it.

    results = measure({"ours": run, "theirs": other}, rounds=5)      # {"ours": [tokens/s of each round], ...}
    quartiles(results["ours"])                                       # (low, median, high): the middle half
    ratio(results["ours"], results["theirs"])                        # median of the ratios of each round

Taking turns means that a machine that slows down slows everybody, and a ratio within a round hardly notices. Before
each turn everybody rests: the threads of the library that ran before go on waiting busily for more work, and who comes
next would share its cores with them (transformers after NumPy lost half of its speed that way).
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from starter.base.console import Console

Run = Callable[[], float]  # one round -> tokens per second
SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # choose kernels and blocks that may not be this processor's
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
REST = 0.3  # seconds before each turn
PACKAGES = ("llama2-py", "transformers", "torch", "numpy", "llama-cpp-python")


def prepare(threads: int) -> None:
    """The environment of a fair run: libraries read it when they are first imported, so call this before."""
    for name in SLOWING:
        os.environ.pop(name, None)
    for name in THREADS:
        os.environ[name] = str(threads)


def measure(contestants: Mapping[str, Run], rounds: int, patience: float | None = None) -> dict[str, list[float]]:
    """One round to warm up, then ``rounds`` in turn.

    With ``patience``, a contestant whose runs have taken more seconds than that sits the other rounds out; if its
    first run has, that is its only value.
    """
    results: dict[str, list[float]] = {name: [] for name in contestants}
    spent = dict.fromkeys(contestants, 0.0)
    console = Console(sys.stderr)
    with console.working() as progress:
        for number in range(rounds + 1):
            if console.width is None:  # a file or a pipe, where nothing is shown but lasting lines
                console.line(f"round {number} of {rounds}" if number else f"warming up: {'; '.join(contestants)}")
            for name, run in contestants.items():
                if patience is None or spent[name] <= patience:
                    progress(f"round {number} of {rounds}: {name}" if number else f"warming up: {name}")
                    sleep(REST)
                    start = perf_counter()
                    results[name].append(run())
                    spent[name] += perf_counter() - start
    return {name: values[1:] or values for name, values in results.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The middle half and the median between."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def times(values: Sequence[float], peer: Sequence[float]) -> float:
    """Median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(values, peer))


def ratio(values: Sequence[float], peer: Sequence[float] | None) -> str:
    """The same as text; "-" where the peer is missing."""
    return f"{times(values, peer):.2f}" if peer else "-"


def like_ours(name: str) -> str:
    """The transformers of the same batch."""
    return f"transformers, {'batch 8' if 'batch 8' in name else 'batch 1'}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    return {"python": platform.python_version(), "system": platform.platform(), "processor": processor(),
            "cores": cores(), "threads": int(os.environ.get(THREADS[0], cores())),
            "packages": {package: installed(package) for package in PACKAGES}}


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Its name where the system tells, else its architecture."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8", errors="replace").splitlines() if listing.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())
