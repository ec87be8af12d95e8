"""M3 · Records that are made for every token, made fast.

A NamedTuple is read by name and costs as little memory as a tuple, but making one by its name takes a call of a Python
function. ``quick`` goes to the tuple directly:

    choice = quick(Choice)                once
    choice((5, -0.1, ()))                 equals Choice(5, -0.1, ()), in less than half the time

Nobody checks that there are as many values as fields: it is for the few places that a step passes for each request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

Kind = TypeVar("Kind", bound=NamedTuple)


def quick(kind: type[Kind]) -> Callable[[tuple[Any, ...]], Kind]:
    """A maker of ``kind`` out of the tuple of all its values, those with defaults included."""
    make: Callable[[tuple[Any, ...]], Kind] = partial(tuple.__new__, kind)
    return make
