"""M3 · From logits to a token: greedy, or drawn from the request's own generator.

The kept tokens are chosen in a fixed order: temperature, then top_k, top_p, min_p on what is left. Edges:

    temperature 0       greedy; among equal maxima the lowest token number wins
    temperature tiny    safe: logits are divided after the maximum was subtracted, so nothing overflows
    top_k 0 or >= V     keeps all; 1 equals greedy, ties included
    top_p 0 or tiny     keeps the likeliest token; 1 keeps all
    min_p 1             keeps the likeliest token and its equals
    NaN in the logits   BackendError: the request ends with an error, never with a silent token 0
    +inf, or all -inf   BackendError: no distribution exists
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, isnan, log

from .errors import BackendError
from .schema import Request, SamplingParams


def request_generator(request: Request, engine_seed: int) -> random.Random:
    """The generator of one request. It depends on the request's seed, or on the engine's seed and the request's id,
    and on nothing else: neighbours, batches and preemption cannot change what it draws."""
    seed = request.sampling.seed
    return random.Random(f"{engine_seed}/{request.request_id}" if seed is None else seed)


def sample(logits: Sequence[float], params: SamplingParams, generator: random.Random) -> tuple[int, float]:
    """Pick a token; return it and the logarithm of its probability at temperature 1. O(V), O(V log V) if filtered.

    One number is drawn from the generator for every sampled token, none for a greedy one.
    """
    highest = max(logits)
    if not -inf < highest < inf or any(map(isnan, logits)):
        raise BackendError("the logits hold NaN or infinity, or are all -inf: no token can be chosen from them")
    token = logits.index(highest) if params.temperature == 0.0 else _draw(logits, highest, params, generator)
    total = sum(exp(value - highest) for value in logits)
    return token, logits[token] - highest - log(total)


def _draw(logits: Sequence[float], highest: float, params: SamplingParams, generator: random.Random) -> int:
    kept = kept_tokens(logits, highest, params)
    cumulative = list(accumulate(weight for _, weight in kept))
    target = generator.random() * cumulative[-1]
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
