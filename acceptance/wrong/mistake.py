"""What a wrong implementation is made of: a few replaced functions of the complete engine, and the tests meant for it.

    @mistake(16, "M3ContinuousBatching.test_freed_slot_is_used_at_once", says="admit in every step")
    def static_batching(patch):
        '''Static batching: a freed slot idles until the longest request ends.'''
        right = ContinuousBatchScheduler.__init__
        ...
        patch(ContinuousBatchScheduler, "__init__", init)

    with MISTAKES["static_batching"].installed():
        ...                                         # every engine made in here batches statically

A suite is worth what it catches: ``python3 -m acceptance wrong`` runs all of it against all of these (docs/wrong.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import starter

MODULES = ("kv_cache", "pages", "scheduler", "quantization", "lifecycle", "cheats", "requests", "different")
MISTAKES: dict[str, Variant] = {}  # by name, filled by the decorators
DIFFERENT: dict[str, Variant] = {}  # other implementations that are right, and have to pass


class Patches(ExitStack):
    """``patch(owner, name, new)`` replaces an attribute until the end."""

    def __call__(self, owner, name, new):
        self.enter_context(mock.patch.object(owner, name, new))

    def everywhere(self, function, new):
        """Replace a function under every name that modules of ``starter`` have for it."""
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] == "starter":
                for name in [name for name, value in vars(module).items() if value is function]:
                    self(module, name, new)


@dataclass(frozen=True)
class Variant:
    """One implementation that differs from the complete engine. ``line``: of the list of mistakes, if it is in it;
    ``meant``: ids of the tests that must fail; ``says``: what their messages must contain."""

    install: Callable[[Patches], Any]
    line: int | None = None
    meant: tuple[str, ...] = ()
    says: str = ""

    @property
    def name(self):
        return self.install.__name__

    @property
    def summary(self):
        """The docstring in one line."""
        return " ".join((self.install.__doc__ or "").split())

    @contextmanager
    def installed(self):
        """The engine is this one, inside."""
        with Patches() as patch:
            self.install(patch)
            yield


def mistake(line, *meant, says):
    """Decorator: a function that installs a mistake."""
    def register(install):
        MISTAKES[install.__name__] = Variant(install, line, meant, says)
        return install
    return register


def different(*meant):
    """Decorator: a function that installs another right implementation; ``meant``: the milestones it concerns."""
    def register(install):
        DIFFERENT[install.__name__] = Variant(install, meant=meant)
        return install
    return register


def load_all():
    """Import all modules of mistakes, so that MISTAKES and DIFFERENT are complete."""
    for name in starter.__all__:
        getattr(starter, name)  # imported at first use, which must not be while something is replaced
    for name in MODULES:
        import_module(f"{__package__}.{name}")


def find(name):
    """A variant by its name."""
    load_all()
    return {**MISTAKES, **DIFFERENT}[name]
