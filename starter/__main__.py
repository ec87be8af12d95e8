"""The commands of ``python3 -m starter``; each belongs to a wing.

    python3 -m starter replay | check | metrics | trace | report RUN.jsonl     what can be done with a timeline on disk
"""

from __future__ import annotations

from .base.console import guarded, run_program
from .base.wings import wing


def main() -> int:
    """Hand the command line to the wing that knows the command; returns the exit code."""
    return guarded(lambda: int(wing("observe.commands", "python3 -m starter").main()))


if __name__ == "__main__":
    run_program(main)
