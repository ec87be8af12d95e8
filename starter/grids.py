"""M5 · Choosing a group's grid: from the smallest number to the largest, or the one with the least squared error.

    Grid(scale=0.5, first=-2, last=2):     -1.0    -0.5     0.0     0.5     1.0
                                             |       |       |       |       |
    numbers of the group                      x          x x   x       x           x
                                                                                clipped to 1.0

``nearest`` lets the grid end at the group's smallest and largest number: no number is clipped, but one outlier makes
all steps wide. ``search`` narrows and widens the grid a little, tries where to cut, and keeps what has the least
squared error, a sum over the columns weighted by their *importance* where it is given:

    error(grid)  =  sum over the group of  importance[c] * (x - nearest grid point)**2

With importance[c] the mean square of what the column is multiplied with (``calibration.py``) this is the expected
squared error of the layer's output, where the products of two columns' inputs average to 0.

Sources, and what was taken: Frantar et al. 2022, "GPTQ" (the error that counts is the output's: the squared error under
the Hessian 2 X X^T of the inputs; taken: its diagonal, not the compensation between columns). Lin et al. 2023, "AWQ"
(the columns with large activations matter most, and a small grid search finds a good trade; taken: both, but as
weights of the error, not by scaling the columns). Dettmers et al. 2022, "LLM.int8()" (a few input features are
outliers: why one column may count hundreds of times as much as another). llama.cpp's ``make_qx_quants`` refines
the scale of given codes by least squares; so does ``_refined`` here.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import cycle
from math import ceil, fsum, inf
from operator import mul
from typing import NamedTuple

from .schema import QuantizationConfig

Numbers = Sequence[float]

_SMALLEST = sys.float_info.min * sys.float_info.epsilon  # the smallest double above 0
_FLOAT32_NORMAL = (2.0**-126, 2.0**127)  # where float32 keeps its 24 bits; the upper end leaves room to round up
_INT16 = range(-(2**15), 2**15)
ZERO_POINT_FORMAT = {"f": "h", "d": "q"}  # float32 scales with int16 zero points, float64 with int64

# The range takes so many steps more than there are; asymmetric, each with every whole number of steps cut off below.
# Found by trying: twice as many tries lower the error by another 0.3%.
_EXTRA_STEPS = {True: (1.0, 2.0, 3.0, 4.0), False: (-0.5, 0.5, 1.0, 2.0)}


class Grid(NamedTuple):
    """The points scale * first, scale * (first + 1), ..., scale * last."""

    scale: float
    first: int
    last: int

    def nearest(self, group: Numbers) -> list[int]:
        """For each number the i whose point scale * i is nearest."""
        scale, first, last = self
        points = [round(x / scale) for x in group]
        if min(points) < first or max(points) > last:
            points = [first if i < first else last if i > last else i for i in points]
        return points

    def error(self, group: Numbers, importance: Numbers) -> float:
        """Sum of importance * (number - its nearest point)**2."""
        misses = [x - self.scale * i for x, i in zip(group, self.nearest(group))]
        return fsum(map(mul, importance, map(mul, misses, misses)))


def choose_grids(groups: Sequence[Numbers], config: QuantizationConfig,
                 importance: Sequence[Numbers]) -> tuple[str, list[Grid]]:
    """The grid of each group, and the format of the scales: "f" (float32), or "d" if any needs a float64.

    ``importance``: the weights of the first group's numbers, the second's, ...; they repeat with each row. Only a
    "search" looks at them, and only at their ratios. A tensor so wide or so far from zero that it needs float64 is
    not searched. O(numbers); a search takes 7 to 10 times as long as none.
    """
    number_format, grids = _full_range_grids(groups, config)
    if config.method == "nearest" or number_format == "d":
        return number_format, grids
    return "f", [_search(group, grid, weights, config.symmetric)
                 for group, grid, weights in zip(groups, grids, cycle(importance))]


def lowest_code(config: QuantizationConfig) -> int:
    """The code of a grid's first point."""
    return 1 - 2 ** (config.bits - 1) if config.symmetric else 0


# ---------------------------------------------------------------------------- from the smallest to the largest


def _full_range_grids(groups: Sequence[Numbers], config: QuantizationConfig) -> tuple[str, list[Grid]]:
    """Scales in float32 and zero points in int16 where all fit, else in float64 and int64.

    int64 always suffices: two different doubles are at least 2**-53 of the larger apart, so |low / scale| < 2**62.
    """
    lows, highs = list(map(min, groups)), list(map(max, groups))
    steps = 2**config.bits - 1 - config.symmetric  # from the lowest code to the highest
    if config.symmetric:
        highs = [max(-low, high) for low, high in zip(lows, highs)]
        lows = [-high for high in highs]
    exact = [_scale(low, high, steps) for low, high in zip(lows, highs)]
    candidates = [array("d", exact)]
    if _FLOAT32_NORMAL[0] <= min(exact) and max(exact) <= _FLOAT32_NORMAL[1]:
        candidates.insert(0, _round_up_to_float32(exact))
    for scales in candidates:
        firsts = ([-steps // 2] * len(scales) if config.symmetric else
                  [round(low / scale) for low, scale in zip(lows, scales)])
        if scales.typecode == "d" or (-max(firsts) in _INT16 and -min(firsts) in _INT16):
            break
    return scales.typecode, [Grid(scale, first, first + steps) for scale, first in zip(scales, firsts)]


def _scale(low: float, high: float, steps: int) -> float:
    """The spacing that takes ``steps`` steps from low to high."""
    if low == high:
        return abs(low) or 1.0  # one grid point is enough: code - zero_point is 1, -1, or 0 for zeros
    width = high - low
    scale = width / steps if width < inf else high / steps - low / steps
    return scale + _SMALLEST  # rounds a subnormal quotient up, so that it is not 0 nor much too small; else no change


def _round_up_to_float32(values: Numbers) -> array[float]:
    """Nearest float32 that is not smaller. Adding 2**-23 of a value moves it past its upper float32 neighbour."""
    nearest = array("f", values)
    return array("f", [v if near >= v else v * (1 + 2**-23) for near, v in zip(nearest, values)])


# ----------------------------------------------------------------------------------- the least squared error


def _search(group: Numbers, full: Grid, importance: Numbers, symmetric: bool) -> Grid:
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
            if zero_stays and -first in _INT16:
                yield Grid(scale, first, first + steps)


def _refined(grid: Grid, group: Numbers, weighted: Numbers, importance: Numbers) -> tuple[float, Grid]:
    """The scale that suits the grid's own points best, and how far it takes the error below sum(w * x * x).

    sum(w * (x - scale * i)**2) is a parabola in the scale: least at a / b, where it is a**2 / b below its value at 0,
    with a = sum(w * x * i), b = sum(w * i * i).
    """
    points = grid.nearest(group)
    a, b = sum(map(mul, weighted, points)), sum(map(mul, importance, map(mul, points, points)))
    return (a * a / b, grid._replace(scale=a / b)) if a > 0.0 < b else (0.0, grid)
