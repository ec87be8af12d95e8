"""M3 · A row of logits whose likeliest token is known already.

A backend that computes on arrays finds the likeliest token of every row of a batch at once. Greedy sampling needs
nothing else, so the numbers themselves become Python floats only where somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload


class Logits(Sequence[float]):
    """``best`` is the likeliest token (of equals, the lowest number), ``logprob`` the logarithm of its probability.
    ``row`` is the backend's own, with ``tolist``."""

    __slots__ = ("_row", "best", "logprob")

    def __init__(self, best: int, logprob: float, row: Any) -> None:
        self.best, self.logprob, self._row = best, logprob, row

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
