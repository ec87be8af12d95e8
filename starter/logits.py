"""M3 · A row of logits whose likeliest token is known already.

A backend that computes on arrays finds the likeliest token of every row of a batch at once. Greedy sampling needs
nothing else, so the numbers themselves become Python floats only where somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload


class Choice(NamedTuple):
    """A token, the logarithm of its probability by the model alone (temperature 1, nothing adjusted), and the
    likeliest tokens with theirs, as many as were asked for; the chosen token is always among them."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Logits(Sequence[float]):
    """``greedy`` is the likeliest token, of equals the lowest number. ``row`` is the backend's own, with ``tolist``."""

    __slots__ = ("_row", "greedy")

    def __init__(self, greedy: Choice, row: Any) -> None:
        self.greedy, self._row = greedy, row

    def __len__(self) -> int:
        return len(self._row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __iter__(self) -> Iterator[float]:
        return iter(self._row.tolist())

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> list[float]: ...

    def __getitem__(self, index: int | slice) -> float | list[float]:
        found: float | list[float] = self._row[index].tolist()
        return found
