"""One kernel at a size at which its speed can be seen: how to launch it, what must come out, what it must move.

    work.launch()
    work.error()          largest distance from the formula in float64, over the largest number of the result
    work.nbytes           bytes that must move: every input once, every number of the result once
    work.numpy()          the same in NumPy on the processor, in float32: what the times stand beside

``Size()`` is for a card: matrices and pages several times larger than its cache, so that they come from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = 2e-5  # of the largest number: sums of thousands of products in float32


@dataclass(frozen=True)
class Size:
    """[rows, columns] of a matrix, tokens of a step, rows of a decode batch, their contexts, and a request's heads."""

    rows: int = 16_384
    columns: int = 8_192
    tokens: int = 4_096
    batch: int = 64
    vocabulary: int = 131_072
    requests: int = 8
    context: int = 4_096
    chunk: int = 256
    kv_heads: int = 8
    group: int = 4
    head_width: int = 128
    page_size: int = 16


SMALL = Size(rows=37, columns=161, tokens=19, batch=9, vocabulary=1_027, requests=3, context=101, chunk=17, kv_heads=2,
             group=2, head_width=10)


@dataclass
class Workload:
    """``fetch`` gives the result as an array; ``wanted`` the same in float64; ``reset`` undoes what a launch changed
    of its own input."""

    kernel: str
    case: str
    launch: Callable[[], None]
    fetch: Callable[[], Any]
    wanted: Callable[[], Any]
    numpy: Callable[[], object] | None
    nbytes: int
    operations: int
    reset: Callable[[], None] = lambda: None

    def error(self) -> float:
        """Of one launch."""
        self.reset()
        self.launch()
        wanted, got = self.wanted(), self.fetch().astype(np.float64)
        return float(abs(got - wanted).max() / max(1.0, abs(wanted).max()))

    def bits(self) -> bytes:
        """Of one launch."""
        self.reset()
        self.launch()
        bits: bytes = self.fetch().tobytes()
        return bits


def draw(rng: Any, *shape: int) -> Any:
    """float32 normal numbers."""
    return rng.standard_normal(shape, dtype=np.float32)
