"""Timelines to judge: of random runs with everything in them, and of one small run that shows most kinds of events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from unittest.mock import patch

from scripts import fuzz
from starter.base.fault_kinds import AbnormalRelease, MemoryCut
from starter.engine import InferenceEngine
from starter.schema import SamplingParams
from starter.timeline import Event
from tests.support import make_engine


def as_read(events: Iterable[Event]) -> list[Event]:
    """Events as a file gives them back."""
    read: list[Event] = json.loads(json.dumps(list(events)))
    return read


def random_run(seed: int, operations: int = 60) -> list[Event]:
    """All of ``scripts/fuzz.py``: sharing, samples, swapping, cancels, refusals, faults, outsiders."""
    run = fuzz.Fuzz(seed)
    with patch.object(run, "reckon"):  # what was streamed is not what is judged here
        run.run(operations)
    return as_read(run.engine.timeline)


def can_be_told(events: Iterable[Event]) -> bool:
    """False where a fault counts what outsiders asked for in vain, which no event tells."""
    kinds = [fault["kind"] for event in events if event["event"] == "inject" for fault in event["faults"]]
    return "refused_pages" not in kinds


def full_engine() -> InferenceEngine:
    """After a run with preemption by swapping, shared prefixes, two samples, an eviction, a cancel, a refusal, an
    outsider and two faults."""
    engine = make_engine(page_size=2, num_pages=10, budget_tokens=6, max_running=3, preemption="swap", host_pages=8,
                         prefix_sharing=True)
    first = [3, 1, 4, 1, 5]
    engine.submit(first, 6, request_id="a", priority=1)
    engine.step()
    engine.submit([*first, 9, 2], 6, request_id="b", sampling=SamplingParams(0.7, seed=3, n=2))
    engine.submit([8, 8, 8], 9, request_id="c", stop_tokens=[19])
    outside = engine.kv.fork(engine.scheduler.handle("a"), "outsider")
    numbers = [0.0] * engine.kv.width
    engine.kv.append(outside, numbers, numbers)
    for _ in range(3):
        engine.step()
    engine.kv.release(outside)
    engine.cancel("c")
    engine.run()
    engine.submit([*first, 9, 2], 3, request_id="h")  # finds pages that nobody has any more
    engine.run()
    engine.inject([MemoryCut(1, 3, 3), AbnormalRelease(2, "d")])
    engine.submit([7, 7, 7], 8, request_id="d")
    engine.submit([*first, 5], 8, request_id="e", cache_salt="salt")
    engine.submit([6] * 5, 7, request_id="f")
    engine.submit([5] * 4, 7, request_id="g")
    engine.submit([*first, 6], 0, request_id="none")
    try:
        engine.submit([], 1)
    except ValueError:
        engine.run()
    return engine
