"""M1 · How fast the rotary embedding turns each pair of a head, and how long-context models slow it down.

Rotary embedding (Su et al. 2021, "RoFormer") turns pair i of a head of d numbers, at position p, by the angle
p * theta ** (-2i / d): the first pair by one radian a token, the last by one in about theta tokens. A model trained on
n positions has never seen angles beyond those at n, so models for longer texts turn more slowly:

    linear     every frequency is divided by the factor (Chen et al. 2023, "Position Interpolation")
    llama3     a pair that turns fully many times within the original context stays as it is, one that turns less than
               once or so is divided by the factor, and between them a straight line (Llama 3.1)
    factors    each frequency is divided by a factor of its own: how GGUF files write llama3 down
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Annotated, Union

from starter.base.strict_json import ListOf, Number, Record, Tagged
from starter.errors import SchemaError

_FACTOR = Number(1e-6, 1e6)


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by ``factor``."""

    factor: Annotated[float, _FACTOR]

    def scale(self, frequencies: list[float]) -> list[float]:
        """The frequencies of a head's pairs, slowed down."""
        return [frequency / self.factor for frequency in frequencies]


@dataclass(frozen=True)
class Llama3Scaling:
    """A pair that turns at least ``high_freq_factor`` times within ``original_context`` positions keeps its frequency;
    one that turns at most ``low_freq_factor`` times has it divided by ``factor``."""

    factor: Annotated[float, _FACTOR]
    low_freq_factor: Annotated[float, _FACTOR]
    high_freq_factor: Annotated[float, _FACTOR]
    original_context: Annotated[float, Number(1.0, 1e9)]

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise SchemaError(f"must be above low_freq_factor {self.low_freq_factor}, not {self.high_freq_factor}",
                              "/high_freq_factor")

    def scale(self, frequencies: list[float]) -> list[float]:
        """The frequencies of a head's pairs, the slow ones slowed down."""
        scaled = []
        for frequency in frequencies:
            turns = self.original_context * frequency / (2.0 * pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = min(max(kept, 0.0), 1.0)
            scaled.append(kept * frequency + (1.0 - kept) * frequency / self.factor)
        return scaled


@dataclass(frozen=True)
class FactorScaling:
    """The frequency of each pair divided by its own factor."""

    factors: Annotated[tuple[float, ...], ListOf(_FACTOR, 1, 65_536)]

    def scale(self, frequencies: list[float]) -> list[float]:
        """The frequencies of a head's pairs, each slowed down by its factor."""
        return [frequency / factor for frequency, factor in zip(frequencies, self.factors)]


RopeScaling = Union[LinearScaling, Llama3Scaling, FactorScaling]

ROPE_SCALING_SHAPE = Tagged("kind", {
    "linear": Record.of(LinearScaling), "llama3": Record.of(Llama3Scaling), "factors": Record.of(FactorScaling),
})


def rotary_frequencies(head_width: int, theta: float, scaling: RopeScaling | None = None) -> tuple[float, ...]:
    """Radians that each of the head_width / 2 pairs turns from one position to the next."""
    frequencies = [theta ** (-pair / head_width) for pair in range(0, head_width, 2)]
    return tuple(scaling.scale(frequencies) if scaling else frequencies)
