"""How the spine reaches a wing: by name, when it is asked for, never by an import.

A wing is a package that can be deleted. What it gave is then refused in one sentence, and nothing else changes:

    make = wing("backends.lanes.backend", "backend 'cpu'").LanesBackend
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from starter.errors import MissingWingError


def wing(module: str, purpose: str) -> Any:
    """The module ``starter.<module>`` of a wing. MissingWingError says what ``purpose`` lacks where it was deleted."""
    name = f"starter.{module}"
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # the wing is here; a package that it uses is not
        folder = missing.name.replace(".", "/")
        raise MissingWingError(f"{purpose} needs the package {folder}, which this copy does not have; "
                               f"take it from the complete project, or do without") from None


def picture(name: str, thing: object) -> str | None:
    """What a notebook shows of ``thing``; None, and so its repr, where ``observe`` was deleted."""
    try:
        drawn: str = getattr(wing("observe.notebook", "a picture"), name)(thing)
    except MissingWingError:
        return None
    return drawn
