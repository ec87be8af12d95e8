"""The command line: run a scenario or continue prompts, and show what the engine does.

    python3 starter/driver.py --fixture fixtures/tiny_model.json
    python3 starter/driver.py --fixture fixtures/quatrains.json --prompt 春 --temperature 0.8
    python3 starter/driver.py --checkpoint MODEL --prompt "Once upon a time" --max-tokens 64
    python3 starter/driver.py --checkpoint MODEL --backend numpy --chat "What is the capital of France?"

Exit code 0: all went well and the output equals the golden tokens. 1: it differs, or a prompt could not be finished.
2: bad input, said in one line. 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: make the package importable, and its modules not importable by bare names
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from starter.base.console import Console, guarded, run_program
from starter.command.options import check_options, make_parser, plays_scenario
from starter.command.run import run_prompts, run_scenario


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    options = make_parser(__doc__).parse_args(arguments)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    console = Console(sys.stdout, quiet=options.quiet or options.json)
    return run_scenario(options, console) if plays_scenario(options) else run_prompts(options, console)


if __name__ == "__main__":
    run_program(main)
