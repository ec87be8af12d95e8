"""M3 · Who goes first when not everybody can: policies behind one small interface.

A policy gives a request a *rank* in steps, as if it had arrived at that step; the smaller rank is served first, and the
largest is the first to be preempted. Aging needs no clock: all waiting requests age alike, so their order does not
change while they wait. With A = AGING steps:

    fcfs            rank = arrival                            nobody is overtaken by later arrivals
    priority        rank = arrival - A * priority             one level of priority is worth A steps of waiting
    shortest        rank = arrival + remaining tokens / A     so many tokens less are worth a step of waiting
    prefill-first   rank = arrival, but prompts are computed before decodes, unless a decode has waited A steps for
                    them: the bad example

What that promises (k and the bound as in ``scheduler.py``): only requests of a smaller rank go before a request, and
from a finite number of steps after its arrival on every new request has a larger one. So k counts

    fcfs            the requests that arrived before it
    priority        those, and later ones of a higher priority p' that arrive within A * (p' - p) steps
    shortest        those, and later ones with fewer remaining tokens that arrive within (difference) / A steps
    prefill-first   as fcfs; but while prompts arrive, whoever runs gets a token in one of A + 1 steps only, so all
                    waits are as many times as long
"""

from __future__ import annotations

from typing import Protocol

from .schema import Request

AGING = 16


class Policy(Protocol):
    """Ranks requests; see the module's docstring."""

    decode_first: bool  # else prompts go first, but for no more than AGING steps on end

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        """Rank of a request that arrived at ``arrival_step`` and has generated so many tokens. Computed at submit and
        at each preemption; it must never grow."""


class FirstComeFirstServed:
    """The order of arrival."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step


class PriorityWithAging:
    """Higher priority first, unless it came AGING steps later for each level."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step - AGING * request.priority


class ShortestRemainingWithAging:
    """Fewer tokens left to compute first, unless it came a step later for each AGING tokens."""

    decode_first = True

    def rank(self, request: Request, arrival_step: int, generated: int) -> float:
        return arrival_step + (len(request.prompt_tokens) + request.max_tokens - generated) / AGING


class PrefillFirst(FirstComeFirstServed):
    """Prompts before decodes: the best time to first token, and running requests nearly stop while prompts arrive."""

    decode_first = False


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAging,
    "shortest": ShortestRemainingWithAging,
    "prefill-first": PrefillFirst,
}
