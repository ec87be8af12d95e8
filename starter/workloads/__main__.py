"""``python3 -m starter.workloads``: draw a scenario from a seed."""

from starter.base.console import run_program
from starter.workloads.draw import main

if __name__ == "__main__":
    run_program(main)
