"""Extras in tests: a missing package skips loudly; with P07_REQUIRE_EXTRAS=1, as in CI, it fails."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

Case = TypeVar("Case", bound=type[unittest.TestCase])


def needs(extra: str, *packages: str) -> Callable[[Case], Case]:
    """Class decorator: run only where the packages of an extra are installed."""
    missing = [package for package in packages if not find_spec(package)]
    if not missing or os.environ.get("P07_REQUIRE_EXTRAS") == "1":
        return lambda case: case  # where a package is missing all the same, its import fails the test
    return unittest.skip(f"SKIPPED: needs {', '.join(missing)}: pip install '.[{extra}]'")
