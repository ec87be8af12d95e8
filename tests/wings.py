"""Wings in tests: where a package of ``starter`` was deleted, tests that need it skip loudly; with P07_REQUIRE_WINGS=1,
as in CI, they fail.

    if has_wing("observe"):
        from starter.observe.timeline_file import read_timeline

    @needs_wing("observe")
    def test_what_is_written_can_be_read(self) -> None: ...
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from tests.paths import ROOT

Test = TypeVar("Test", bound=Callable[..., Any])


def has_wing(wing: str) -> bool:
    """Whether ``starter`` has this package: "observe", "backends/lanes". Always True where no wing may be missing, so
    that its import fails the test."""
    required = os.environ.get("P07_REQUIRE_WINGS") == "1"
    return required or (ROOT / "starter" / wing / "__init__.py").is_file()


def needs_wing(*wings: str) -> Callable[[Test], Test]:
    """Decorator of a class or of a test: run only where these packages of ``starter`` are present."""
    missing = [f"starter/{wing}" for wing in wings if not has_wing(wing)]
    return unittest.skip(f"SKIPPED: needs the package {', '.join(missing)}") if missing else lambda test: test
