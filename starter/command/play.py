"""A scenario, run: its requests arrive, its cancels happen, a step at a time.

    for played in play(engine, scenario):
        print(played.decision, played.events)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from starter.engine import InferenceEngine
from starter.errors import RequestError
from starter.scheduler import ScheduleDecision
from starter.schema import Request, Scenario, TokenEvent


@dataclass
class Played:
    """What a step brought: its decision and the events that became readable."""

    decision: ScheduleDecision
    events: list[TokenEvent]
    refused: dict[str, str] = field(default_factory=dict)  # request id -> why submit refused it


def play(engine: InferenceEngine, scenario: Scenario) -> Iterator[Played]:
    """Run the scenario's requests and events to the end, a step at a time. Arrivals count in the engine's steps from
    now; a request that is refused is reported and the run goes on.

    Idle time takes no step: when no request is live, the next one comes at once, and everything after it is moved
    forward by as much. (With faults, whose steps the engine counts itself, every idle step is run.)
    """
    start = engine.steps
    left_out = 0  # steps of idle time
    arrivals = deque(sorted(scenario.requests, key=lambda request: request.arrival))  # a stable sort
    cancels = deque(sorted(scenario.events, key=lambda event: event.step))
    slow = engine.inject(scenario.faults).slow if scenario.faults else frozenset()
    live: Counter[str] = Counter()  # request id -> samples that have not ended
    while arrivals or live:
        if arrivals and engine.scheduler.idle and not scenario.faults:
            left_out = max(left_out, ceil(arrivals[0].arrival) - (engine.steps - start))
        now = engine.steps - start + left_out
        while cancels and cancels[0].step < now:
            cancels.popleft()  # in idle time: there was nothing to cancel
        refused = {}
        while arrivals and arrivals[0].arrival <= now:
            request = arrivals.popleft()
            try:
                live[_submit(engine, request)] = request.sampling.n
            except RequestError as error:
                refused[request.request_id] = str(error)
        while cancels and cancels[0].step <= now:
            request_id = cancels.popleft().cancel
            if request_id in live:
                engine.cancel(request_id)
        decision = engine.step()
        readable = live.keys() - slow or live.keys()  # slow consumers read when no other stream is left
        events = [event for request_id in sorted(readable) for event in engine.poll(request_id)]
        live -= Counter(event.request_id for event in events if event.finish_reason)
        yield Played(decision, events, refused)


def _submit(engine: InferenceEngine, request: Request) -> str:
    return engine.submit(request.prompt_tokens, request.max_tokens, request_id=request.request_id,
                         sampling=request.sampling, priority=request.priority, stop_tokens=request.stop_tokens,
                         cache_salt=request.cache_salt)


def tokens_of(events: list[TokenEvent]) -> dict[str, list[int]]:
    """Tokens by request id, in order; a request that ended without any has an empty list. Of a request with several
    samples, the first has its id, the others "<id>#1", "<id>#2", ..."""
    tokens: dict[str, list[int]] = {}
    for event in events:
        mine = tokens.setdefault(event.sequence_id, [])
        if event.token is not None:
            mine.append(event.token)
    return tokens
