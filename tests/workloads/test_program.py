"""``python3 -m starter.workloads`` ends as every program of the project does: full disks, closed pipes, bad options."""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence

from tests.base import test_console


class WorkloadsProgramTest(test_console.ProgramsTest):
    programs: Mapping[str, Sequence[str]] = {"workloads": ()}
    bad: Mapping[str, Sequence[str]] = {"workloads": ("--rate", "0")}


if __name__ == "__main__":
    unittest.main()
