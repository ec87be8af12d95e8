"""M5 · Quantization method "search": for each group the grid with the least squared error that a short search finds.

    Grid(scale=0.5, first=-2, last=2):     -1.0    -0.5     0.0     0.5     1.0
                                             |       |       |       |       |
    numbers of the group                      x          x x   x       x           x
                                                                                clipped to 1.0

Method "nearest" lets the grid end at the group's smallest and largest number: it clips no number, but one outlier makes
all steps wide. The search makes that grid a little narrower and wider, tries where to cut it off, and keeps the grid
with the least squared error, weighted by the *importance* of the columns if it is given:

    error(grid)  =  sum over the group of  importance[c] * (x - nearest grid point)**2

With importance[c] the mean square of what column c is multiplied with (``importance.py``) this is the expected squared
error of the layer's output, if the products of two different columns' inputs average to 0.

Sources, and what was taken: Frantar et al. 2022, "GPTQ" (the error that counts is the output's: the squared error under
the Hessian 2 X X^T of the inputs; taken: its diagonal, not the compensation between columns). Lin et al. 2023, "AWQ"
(the columns with large activations matter most, and a small grid search finds a good trade; taken: both, but as weights
of the error, not by scaling the columns). Dettmers et al. 2022, "LLM.int8()" (a few input features are outliers: why
one column may count hundreds of times as much as another). llama.cpp's ``make_qx_quants`` refines the scale of given
codes by least squares; so does ``_refined`` here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import cycle
from math import ceil, fsum
from operator import mul

from starter.base.vectors import checked_rows
from starter.errors import QuantizationError
from starter.quantization import INT16, Grid, Numbers

# Scales to try, given as the number of steps that the range takes more than the grid has. An asymmetric grid is tried
# with every whole number of these cut off at the low end. Twice as many tries lower the error by another 0.3%.
_EXTRA_STEPS = {True: (1.0, 2.0, 3.0, 4.0), False: (-0.5, 0.5, 1.0, 2.0)}


def column_weights(importance: Numbers | None, columns: int) -> list[float]:
    """``columns`` weights, the largest 1 (or all 0); equal ones for None. QuantizationError unless ``importance`` is a
    finite number of at least 0 for each column."""
    if importance is None:
        return [1.0] * columns
    [weights] = checked_rows([importance])
    if len(weights) != columns or min(weights) < 0.0:
        raise QuantizationError(f"importance must be {columns} numbers from 0, one for each column, "
                                f"not {len(weights)} numbers from {min(weights)}")
    largest = max(weights) or 1.0
    return [weight / largest for weight in weights]


def search_grids(groups: Sequence[Numbers], grids: Sequence[Grid], weights: Sequence[Numbers],
                 symmetric: bool) -> list[Grid]:
    """For each group the best grid found, given that of "nearest". ``weights`` are cut into the groups of one row, and
    used again for every row. O(numbers)."""
    return [search(group, grid, importance, symmetric)
            for group, grid, importance in zip(groups, grids, cycle(weights))]


def search(group: Numbers, full: Grid, importance: Numbers, symmetric: bool) -> Grid:
    """The best grid found for a group; ``full``, which spans all of it, unless another's error is smaller."""
    error = squared_error(full, group, importance)
    if error == 0.0:
        return full
    weighted = list(map(mul, group, importance))
    best, most = full, 0.0
    for grid in _tries(group, full, symmetric):
        gain, refined = _refined(grid, group, weighted, importance)
        if gain > most:
            best, most = refined, gain
    stored = best._replace(scale=array("f", [best.scale])[0])
    return stored if squared_error(stored, group, importance) < error else full


def squared_error(grid: Grid, group: Numbers, importance: Numbers) -> float:
    """Sum of importance * (number - its nearest point)**2."""
    misses = [x - grid.scale * i for x, i in zip(group, grid.nearest(group))]
    return fsum(map(mul, importance, map(mul, misses, misses)))


def _tries(group: Numbers, full: Grid, symmetric: bool) -> Iterator[Grid]:
    """Grids of other scales, cut off elsewhere. If the group holds 0 or numbers on both sides of it, 0 is a point."""
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
