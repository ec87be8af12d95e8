"""The grid of least squared error: narrow and widen it a little, try where to cut, keep the best."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import ceil
from operator import mul

from starter.quantization import INT16, Grid, Numbers

# The range takes so many steps more than there are; asymmetric, each with every whole number of steps cut off below.
# Found by trying: twice as many tries lower the error by another 0.3%.
_EXTRA_STEPS = {True: (1.0, 2.0, 3.0, 4.0), False: (-0.5, 0.5, 1.0, 2.0)}


def search(group: Numbers, full: Grid, importance: Numbers, symmetric: bool) -> Grid:
    """The best grid found; ``full`` itself unless another's error is smaller."""
    error = full.error(group, importance)
    if error == 0.0:
        return full
    weighted = list(map(mul, group, importance))
    best, most = full, 0.0
    for grid in _tries(group, full, symmetric):
        gain, refined = _refined(grid, group, weighted, importance)
        if gain > most:
            best, most = refined, gain
    stored = best._replace(scale=array("f", [best.scale])[0])
    return stored if stored.error(group, importance) < error else full


def _tries(group: Numbers, full: Grid, symmetric: bool) -> Iterator[Grid]:
    low, high, steps = min(group), max(group), full.last - full.first
    for extra in _EXTRA_STEPS[symmetric]:
        scale = full.scale * steps / (steps + extra)
        for cut in range(1 if symmetric else ceil(extra) + 1):
            first = full.first if symmetric else round(low / scale) + cut
            zero_stays = first <= 0 <= first + steps or not low <= 0.0 <= high
            if zero_stays and -first in INT16:
                yield Grid(scale, first, first + steps)


def _refined(grid: Grid, group: Numbers, weighted: Numbers, importance: Numbers) -> tuple[float, Grid]:
    """The scale that suits the grid's own points best, and how far it takes the error below sum(w * x * x).

    sum(w * (x - scale * i)**2) is a parabola in the scale: least at a / b, where it is a**2 / b below its value at 0,
    with a = sum(w * x * i), b = sum(w * i * i).
    """
    points = grid.nearest(group)
    a, b = sum(map(mul, weighted, points)), sum(map(mul, importance, map(mul, points, points)))
    return (a * a / b, grid._replace(scale=a / b)) if a > 0.0 < b else (0.0, grid)
