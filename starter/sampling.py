"""M3 · From logits to a token: greedy, or drawn with the sample's own random numbers.

    logits --adjust--> bias, penalties, no early end --temperature--> top_k -> top_p -> min_p --draw--> token

The steps come in this fixed order, each on what the one before it left. Edges, each a test in tests/test_sampling.py:

    temperature 0       greedy; among equal maxima the lowest token number wins
    temperature tiny    safe: logits are divided after the maximum was subtracted, so nothing overflows
    top_k 0 or >= V     keeps all; 1 equals greedy, ties included
    top_p 0 or tiny     keeps the likeliest token; 1 keeps all
    min_p 1             keeps the likeliest token and its equals
    NaN in the logits   BackendError: the request ends with an error, never with a silent token 0
    +inf, or all -inf   BackendError: no distribution exists
    min_tokens          end and stop tokens have no chance before it; if nothing else has one, BackendError
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate, repeat
from math import exp, inf, isnan, log
from operator import sub
from typing import Any, NamedTuple, overload

from .errors import BackendError
from .schema import SamplingParams

# ------------------------------------------------------------------------------------------------------ a row of logits

#: M3 · A row of logits whose likeliest token is known already.
#:
#: A backend that computes on arrays finds the likeliest token of every row of a batch at once. Greedy sampling needs
#: nothing else, so the numbers themselves become Python floats only where somebody asks for them.


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


# ------------------------------------------------------------------------------------------------------ where text ends

#: M3 · Stop strings in streamed text: nothing of a stop string is ever shown, nothing else is ever lost.
#:
#:     stop "CDE"      pushed   "A"   "BC"   "D"   "E"           pushed   "BC"   "D"   "X"
#:                     shown    "A"   "B"    ""    "" stopped    shown    "B"    ""    "CDX"
#:
#: Text that may be the beginning of a stop string is held back until that is decided. When several stop strings could
#: match, the one that is complete first counts (of those, the one that began first), so that the result does not depend
#: on how the text was cut into tokens.


class StopStrings:
    """Watches a text for stop strings. A push costs at most O(S * (S + pushed text)), S being their total length."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """More text -> what may be shown now, and whether a stop string was completed."""
        if not self._stops:
            return text, False
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[:min(ends)[1]], True
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        shown, self._held = text[:len(text) - keep], text[len(text) - keep:]
        return shown, False

    def finish(self) -> str:
        """The text has ended by itself: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that is a proper beginning of the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


# ----------------------------------------------------------------------------------------------- from logits to a token

class Draws:
    """The random numbers of one sample. They depend on the request's seed, or on the engine's seed and the request's
    id, and on the sample's number, and on nothing else: neighbours, batches and preemption cannot change them. A
    number is drawn again until the token it chose is accepted, so an interrupted step changes nothing either."""

    def __init__(self, params: SamplingParams, request_id: str, sample: int, engine_seed: int) -> None:
        seed = f"{engine_seed}/{request_id}" if params.seed is None else str(params.seed)
        self._generator = random.Random(f"{seed}/{sample}")
        self._next: float | None = None

    def random(self) -> float:
        """The next number in [0, 1)."""
        if self._next is None:
            self._next = self._generator.random()
        return self._next

    def accept(self) -> None:
        """It was used."""
        self._next = None


def choose_token(logits: Sequence[float], params: SamplingParams, draws: Draws, prompt: Sequence[int] = (),
           generated: Sequence[int] = (), end_tokens: Collection[int] = ()) -> Choice:
    """Pick the token after ``prompt`` and ``generated``. O(V), O(V log V) if filtered.

    One number is drawn for every sampled token, none for a greedy one.
    """
    if params.plain:
        return greedy(logits)
    if isinstance(logits, Logits):
        logits = list(logits)
    highest = _highest(logits, "the logits")
    adjusted = adjust(logits, params, prompt, generated, end_tokens)
    best = highest if adjusted is logits else _highest(adjusted, "the adjusted logits")
    token = adjusted.index(best) if params.temperature == 0.0 else _draw(adjusted, best, params, draws)
    rest = _log_of_odds(logits, highest)
    return Choice(token, logits[token] - highest - rest, _top_logprobs(logits, highest, rest, token, params.logprobs))


def greedy(logits: Sequence[float]) -> Choice:
    """The likeliest token, of equals the one with the lowest number. O(V), if the backend has not found it yet."""
    if isinstance(logits, Logits):
        return logits.greedy
    highest = _highest(logits, "the logits")
    return Choice(logits.index(highest), -_log_of_odds(logits, highest))


def _log_of_odds(logits: Sequence[float], highest: float) -> float:
    """log(sum(exp(logit - highest))): minus the log probability of the highest. Each logit is shifted only where exp
    could over- or underflow, which saves a third of the time."""
    if -600.0 < highest < 600.0:  # exp(600) times any vocabulary is a double
        return log(sum(map(exp, logits))) - highest
    return log(sum(map(exp, map(sub, logits, repeat(highest)))))


def _highest(logits: Sequence[float], what: str) -> float:
    highest = max(logits)
    if not -inf < highest < inf or (isnan(sum(logits)) and any(map(isnan, logits))):  # NaN stays in a sum
        raise BackendError(f"{what} hold NaN or infinity, or are all -inf: no token can be chosen from them")
    return highest


def _top_logprobs(logits: Sequence[float], highest: float, rest: float, token: int,
                  number: int | None) -> tuple[tuple[int, float], ...]:
    if number is None:
        return ()
    tokens = nsmallest(number, range(len(logits)), key=lambda other: (-logits[other], other))
    if token not in tokens:
        tokens.append(token)
    return tuple((other, logits[other] - highest - rest) for other in tokens if logits[other] > -inf)


def adjust(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int],
           end_tokens: Collection[int]) -> Sequence[float]:
    """Logits with bias and penalties applied and, before ``min_tokens``, no way to end.

    repetition   of tokens in prompt or output: a positive logit is divided by it, a negative one multiplied
                 (Keskar et al. 2019, "CTRL")
    presence     subtracted once from tokens in the output; frequency as often as they stand there (OpenAI's API)
    """
    if len(generated) >= params.min_tokens and not (params.logit_bias or params.repetition_penalty != 1.0
                                                    or params.presence_penalty or params.frequency_penalty):
        return logits  # as nearly always; a vocabulary is long
    adjusted = list(logits)
    for token, bias in params.bias:
        adjusted[token] += bias
    if params.repetition_penalty != 1.0:
        for token in {*prompt, *generated}:
            value = adjusted[token]
            adjusted[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    if params.presence_penalty or params.frequency_penalty:
        for token, times in Counter(generated).items():
            adjusted[token] -= params.presence_penalty + params.frequency_penalty * times
    if len(generated) < params.min_tokens:
        for token in end_tokens:
            adjusted[token] = -inf
    return adjusted


def _draw(logits: Sequence[float], highest: float, params: SamplingParams, draws: Draws) -> int:
    kept = kept_tokens(logits, highest, params)
    cumulative = list(accumulate(weight for _, weight in kept))
    target = draws.random() * cumulative[-1]
    return next((token for (token, _), reached in zip(kept, cumulative) if target < reached), kept[-1][0])


def kept_tokens(logits: Sequence[float], highest: float, params: SamplingParams) -> list[tuple[int, float]]:
    """(token, weight) of the tokens that may be drawn, likeliest first where a filter is on. Weights are
    probabilities up to one common factor: exp((logit - highest) / temperature), so the likeliest has weight 1."""
    weights = [(token, exp((value - highest) / params.temperature)) for token, value in enumerate(logits)]
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return weights
    weights.sort(key=lambda pair: -pair[1])  # a stable sort: equal weights stay in token order
    if params.top_k:
        weights = weights[:params.top_k]
    if params.top_p < 1.0:
        goal = params.top_p * sum(weight for _, weight in weights)
        reached = list(accumulate(weight for _, weight in weights))
        weights = weights[:1 + sum(total < goal for total in reached[:-1])]
    return [pair for pair in weights if pair[1] >= params.min_p]
