"""``python3 -m starter.workloads``: the same as ``python3 -m starter draw``."""

from starter.base.console import run_program
from starter.workloads.draw import main

if __name__ == "__main__":
    run_program(main)
