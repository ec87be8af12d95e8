"""M3 · From logits to a token.

    logits --adjust--> bias, penalties, no early end --temperature--> top_k -> top_p -> min_p --draw--> token

The steps come in this fixed order, each on the result of the one before; it is that of transformers, while vLLM takes
min_p before top_k and top_p. Edges, each a test in tests/test_sampling.py:

    equals              top_k keeps exactly k tokens, top_p the fewest: of equals those with the lowest numbers stay
    border              a sum within BORDER of top_p has reached it, a weight within BORDER of min_p is kept
    temperature 0       greedy; among equal maxima the lowest token number wins
    temperature tiny    safe: logits are divided after the maximum was subtracted, so nothing overflows
    top_k 0 or >= V     keeps all; 1 equals greedy, ties included
    top_p 0 or tiny     keeps the likeliest token; 1 keeps all
    min_p 1             keeps the likeliest token and its equals
    NaN in the logits   BackendError: the request ends with an error, never with a silent token 0
    +inf, or all -inf   BackendError: no distribution exists
    min_tokens          end and stop tokens have probability 0 before it; if no other token has any, BackendError
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate, repeat
from math import exp, inf, isnan, log
from operator import sub
from typing import Any, NamedTuple, Protocol

from .errors import BackendError
from .schema import SamplingParams

BORDER = 1e-9  # relative: above the rounding of sums of a vocabulary (1e-11), below that of logits in float32 (6e-8)


class Choice(NamedTuple):
    """The token that was chosen, the logarithm of its probability by the model alone (temperature 1, nothing adjusted),
    and the likeliest tokens with theirs: as many as the request asked for, and the chosen one if it is not among them.
    """

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler(Protocol):
    """Chooses the next token from a row of logits [vocab_size]. ``choose_token`` is one; an engine accepts others.

    It may draw from ``draws`` and must change nothing. An exception ends the request, and no other.
    """

    def __call__(self, logits: Sequence[float], params: SamplingParams, draws: Draws, prompt: Sequence[int],
                 generated: Sequence[int], end_tokens: Collection[int], /) -> Choice: ...


class Logits(Sequence[float]):
    """A row of logits [vocab_size] whose likeliest token is already known.

    A backend that computes on arrays finds the likeliest tokens of a whole batch at once. ``greedy`` is that of this
    row; among equals it has the lowest number. Greedy sampling needs nothing else, so the numbers stay in ``row``, the
    backend's own array, and become Python floats (by its ``tolist``) only if they are read.
    """

    __slots__ = ("_row", "greedy")

    def __init__(self, greedy: Choice, row: Any) -> None:
        self.greedy, self._row = greedy, row

    def __len__(self) -> int:
        return len(self._row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __iter__(self) -> Iterator[float]:
        return iter(self._row.tolist())

    def __getitem__(self, index: Any) -> Any:
        return self._row[index].tolist()


class Draws:
    """The random numbers of one sample. They depend on the request's seed (without one: on the engine's seed and the
    request's id) and on the number of the sample, on nothing else: other requests, batches and preemption cannot
    change them. The same number is returned until its token is accepted, so that a failed step changes nothing either.
    """

    def __init__(self, params: SamplingParams, request_id: str, sample: int, engine_seed: int) -> None:
        seed = f"{engine_seed}/{request_id}" if params.seed is None else str(params.seed)
        self._generator = random.Random(f"{seed}/{sample}")
        self._next: float | None = None

    def random(self) -> float:
        """The current number, in [0, 1)."""
        if self._next is None:
            self._next = self._generator.random()
        return self._next

    def accept(self) -> None:
        """The token drawn with the current number is final: go on to the next number."""
        self._next = None


# ----------------------------------------------------------------------------------------------- from logits to a token


def choose_token(logits: Sequence[float], params: SamplingParams, draws: Draws, prompt: Sequence[int] = (),
                 generated: Sequence[int] = (), end_tokens: Collection[int] = ()) -> Choice:
    """The token after ``prompt`` and ``generated``. O(V), with filters O(V log V). BackendError if no distribution
    exists.

    A sampled token takes one random number, a greedy one none.
    """
    if params.plain:
        return greedy(logits)
    if isinstance(logits, Logits):
        logits = list(logits)
    highest = _highest(logits, "the logits")
    adjusted = adjust(logits, params, prompt, generated, end_tokens)
    best = highest if adjusted is logits else _highest(adjusted, "the adjusted logits")
    token = adjusted.index(best) if params.temperature == 0.0 else _draw(adjusted, best, params, draws)
    return _scored(logits, highest, token, params.logprobs)


def greedy(logits: Sequence[float]) -> Choice:
    """The likeliest token, among equals the one with the lowest number. O(V), or O(1) for ``Logits``."""
    if isinstance(logits, Logits):
        return logits.greedy
    highest = _highest(logits, "the logits")
    return Choice(logits.index(highest), -_log_sum_exp(logits, highest))


def score(logits: Sequence[float], token: int, number: int) -> Choice:
    """A token that is known, as if it had been chosen: its logprob, and those of the ``number`` likeliest. O(V).
    BackendError if the logits are no distribution."""
    logits = list(logits)
    return _scored(logits, _highest(logits, "the logits"), token, number)


def _log_sum_exp(logits: Sequence[float], highest: float) -> float:
    """log(sum(exp(logit - highest))), so that a token's log probability is logit - highest - this. The logits are
    shifted one by one only if exp could over- or underflow, which saves a third of the time."""
    if -600.0 < highest < 600.0:  # exp(600) times any vocabulary is a double
        return log(sum(map(exp, logits))) - highest
    return log(sum(map(exp, map(sub, logits, repeat(highest)))))


def _highest(logits: Sequence[float], what: str) -> float:
    """The maximum; BackendError if the logits are no distribution."""
    highest = max(logits)
    if not -inf < highest < inf or (isnan(sum(logits)) and any(map(isnan, logits))):  # NaN stays in a sum
        raise BackendError(f"{what} hold NaN or infinity, or are all -inf: no token can be chosen from them")
    return highest


def _scored(logits: Sequence[float], highest: float, token: int, number: int | None) -> Choice:
    log_sum = _log_sum_exp(logits, highest)
    if number is None:
        return Choice(token, logits[token] - highest - log_sum)
    tokens = nsmallest(number, range(len(logits)), key=lambda other: (-logits[other], other))
    tokens += [token] * (token not in tokens)
    return Choice(token, logits[token] - highest - log_sum,
                  tuple((other, logits[other] - highest - log_sum) for other in tokens if logits[other] > -inf))


def adjust(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int],
           end_tokens: Collection[int]) -> Sequence[float]:
    """Logits with bias and penalties applied and, before ``min_tokens``, no way to end. ``logits`` are not changed.

    repetition   for tokens in the prompt or the output: a positive logit is divided by it, a negative one multiplied
                 (Keskar et al. 2019, "CTRL")
    presence     subtracted once for a token in the output; frequency once for each time it is there (OpenAI's API)
    """
    if len(generated) >= params.min_tokens and not (params.logit_bias or params.repetition_penalty != 1.0
                                                    or params.presence_penalty or params.frequency_penalty):
        return logits  # the usual case, without a copy of the whole vocabulary
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
    """One of the kept tokens, with probability proportional to its weight."""
    kept = kept_tokens(logits, highest, params)
    cumulative = list(accumulate(weight for _, weight in kept))
    target = draws.random() * cumulative[-1]
    return next((token for (token, _), reached in zip(kept, cumulative) if target < reached), kept[-1][0])


def kept_tokens(logits: Sequence[float], highest: float, params: SamplingParams) -> list[tuple[int, float]]:
    """(token, weight) of the tokens that may be drawn, likeliest first if there is a filter. Weights are
    probabilities up to one common factor: exp((logit - highest) / temperature), so the likeliest has weight 1."""
    weights = [(token, exp((value - highest) / params.temperature)) for token, value in enumerate(logits)]
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return weights
    weights.sort(key=lambda pair: -pair[1])  # a stable sort: equal weights stay in token order
    if params.top_k:
        weights = weights[:params.top_k]
    if params.top_p < 1.0:
        goal = params.top_p * sum(weight for _, weight in weights) * (1.0 - BORDER)
        reached = list(accumulate(weight for _, weight in weights))
        weights = weights[:1 + sum(total < goal for total in reached[:-1])]
    return [pair for pair in weights if pair[1] >= params.min_p * (1.0 - BORDER)]
