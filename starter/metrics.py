"""M6 · What the numbers mean (T7). Each is a function of timeline events and of nothing else, so anyone can recompute
it: ``Metrics.of(read_timeline("run.jsonl")) == engine.metrics()``.

    TTFT   time to first token: from submit to the first token, queueing included; one sample for each request that
           produced a token, however often it was preempted
    TPOT   time per output token: (last - first) / (n - 1), of ended requests with n >= 2 tokens
    ITL    inter-token latency: between consecutive tokens of a request; a request's TPOT is the mean of its ITL
    E2E    end to end: from submit to the end, whatever the finish reason
    queue time               from submit to the first admission
    batch utilization        scheduled tokens / budget, over the steps that scheduled anything
    active requests          requests with a chunk in a step
    KV pages and bytes       pages in use, a shared page counted once; bytes = pages * bytes of a page (int8 pages hold
                             more while they are being filled; ``engine.kv.stats()`` includes that)
    internal fragmentation   slots of used pages that hold no token, when a step has been planned
    steps                    completed steps; what an abandoned step would have computed is in none of the above
    prefix cache             queries: prompt tokens that were looked up, at a first admission; hits: those found

``observe/prometheus.py`` exports them under the names that vLLM's servers use.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .base.statistics import Durations, Histogram, Summary, duration
from .base.wings import picture
from .errors import SchemaError
from .timeline import FINISH_REASONS, Event

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
          1920.0, 7680.0)
BOUNDS = {"ttft": _FIRST, "itl": _TOKEN, "tpot": _TOKEN, "e2e": _WHOLE, "queue": _WHOLE}  # buckets, as in vLLM


@dataclass(frozen=True)
class Metrics:
    """A snapshot. Times in seconds of the engine's clock, pages of the pool, tokens as counts."""

    submitted: int
    refused: int
    finished: dict[str, int]  # by finish reason
    running: int
    waiting: int
    steps: int
    prompt_tokens: int  # of submitted requests
    output_tokens: int
    computed_tokens: int  # positions that went through the decoder, recomputation included
    found_tokens: int  # prompt tokens that shared pages already held when their request was first admitted
    elapsed_seconds: float  # from the first submit to the last event
    tokens_per_second: float | None  # output tokens / elapsed
    ttft: Summary
    tpot: Summary
    e2e: Summary
    queue: Summary
    histograms: Mapping[str, Histogram]  # "ttft", "itl", "tpot", "e2e" and "queue", in seconds
    batch_utilization: float | None
    active_requests: tuple[int, ...]  # of every step, or of the last 10,000 steps
    active_peak: int  # of every step
    preemptions: int
    prefilled_tokens: int  # of prompts that were computed or found to their end
    queried_tokens: int
    kv_pages: int
    kv_bytes: int
    kv_peak_pages: int
    kv_peak_bytes: int
    kv_usage: float  # pages in use / pages of the pool
    fragmentation_mean: float | None  # slots, over the steps that scheduled anything
    fragmentation_peak: int
    weight_bytes: int  # of all matrices, in the form that is computed with
    model_name: str  # of the scenario or the checkpoint

    @classmethod
    def of(cls, events: Iterable[Event]) -> Metrics:
        """Fold a whole timeline. SchemaError where an event names a request that is not live."""
        collector = MetricsCollector()
        for number, event in enumerate(events, 1):
            try:
                collector.observe(event)
            except KeyError as error:
                raise SchemaError(f"event {number}, {event['event']}: {error} is unknown; is the timeline whole?"
                                  ) from None
        return collector.snapshot()

    def __repr__(self) -> str:
        return (f"<Metrics: {self.submitted} requests, {self.steps} steps, {self.output_tokens} tokens, "
                f"TTFT {duration(self.ttft.p50)}, TPOT {duration(self.tpot.p50)} (medians)>")

    def _repr_html_(self) -> str | None:
        return picture("metrics_table", self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``json.dumps``."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """One JSON document."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(slots=True)
class RequestTimes:
    """A live request, or a further sample of one (``forked``)."""

    submitted: float
    prompt_tokens: int
    first_token: float | None = None  # when it came
    last_token: float | None = None
    running: bool = False
    admitted: bool = False  # at least once
    forked: bool = False


@dataclass
class MetricsCollector:
    """Folds events one at a time: O(1) each, O(chunks) for a step. Its memory is bounded by the live requests: nothing
    of a finished one is kept, and of steps the last 10,000 numbers."""

    header: Event = field(default_factory=dict)
    requests: dict[str, RequestTimes] = field(default_factory=dict)  # the live ones
    counts: Counter[str] = field(default_factory=Counter)
    active: deque[int] = field(default_factory=partial(deque, maxlen=10_000))  # requests of each step
    peaks: tuple[int, int] = (0, 0)  # requests of a step, and empty slots
    planned: Event | None = None  # the last step; it is already counted, but may still be abandoned
    earlier_peaks: tuple[int, int] = (0, 0)  # before it
    durations: dict[str, Durations] = field(
        default_factory=lambda: {name: Durations(bounds) for name, bounds in BOUNDS.items()})
    started: float | None = None
    now: float = 0.0

    def observe(self, event: Event) -> None:
        """Take one event into account; kinds without a handler carry nothing that is measured here."""
        self.now = event["time"]
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)

    def _on_header(self, event: Event) -> None:
        self.header = event

    def _on_submit(self, event: Event) -> None:
        if self.started is None:
            self.started = event["time"]
        self.counts["submitted"] += 1
        self.counts["waiting"] += 1
        self.counts["prompt_tokens"] += len(event["prompt_tokens"])
        self.requests[event["request"]] = RequestTimes(event["time"], len(event["prompt_tokens"]))

    def _on_fork(self, event: Event) -> None:
        parent = self.requests[event["parent"]]
        self.counts["running"] += 1
        self.requests[event["request"]] = RequestTimes(parent.submitted, parent.prompt_tokens, running=True,
                                                       admitted=True, forked=True)

    def _on_refuse(self, event: Event) -> None:
        self.counts["refused"] += 1

    def _on_step(self, event: Event) -> None:
        for name in event["admitted"]:
            request = self.requests[name]
            if not request.admitted:
                self.durations["queue"].add(event["time"] - request.submitted)
                self.counts["queried"] += request.prompt_tokens
            request.admitted = True
            self._move(request, True)
        for name in event["preempted"]:
            self._move(self.requests[name], False)
        self.counts["preemptions"] += len(event["preempted"])
        self.counts["found"] += sum(event["found"].values())
        self.active.append(len(event["chunks"]))
        self.planned, self.earlier_peaks = event, self.peaks
        self._count_step(event, 1)
        if event["chunks"]:
            requests, slots = self.peaks
            self.peaks = max(requests, len(event["chunks"])), max(slots, event["empty_slots"])

    def _move(self, request: RequestTimes, running: bool) -> None:
        """It runs from now on, or waits again."""
        if request.running is not running:
            request.running = running
            self.counts["running"] += 1 if running else -1
            self.counts["waiting"] -= 1 if running else -1

    def _on_abandon(self, event: Event) -> None:
        if self.planned:
            self.active.pop()
            self._count_step(self.planned, -1)
            self.planned, self.peaks = None, self.earlier_peaks

    def _count_step(self, step: Event, times: int) -> None:
        """Count a step (``times`` = 1), or take it back (-1)."""
        counts = self.counts
        counts["steps"] += times
        counts["computed"] += times * step["computed"]
        if scheduled := sum(count for _, _, count, _ in step["chunks"]):
            counts["busy_steps"] += times
            counts["scheduled"] += times * scheduled
            counts["offered"] += times * step["budget"]
            counts["empty_slots"] += times * step["empty_slots"]

    def _on_pages(self, event: Event) -> None:
        self.counts["used_pages"] = event["used_pages"]
        self.counts["peak_pages"] = max(self.counts["peak_pages"], event["used_pages"])

    def _on_token(self, event: Event) -> None:
        self.tokens([event["request"]], event["time"])

    def tokens(self, sequences: Collection[str], time: float) -> None:
        """Each of these sequences has a new token. O(1) for each."""
        self.now = time
        self.counts["output_tokens"] += len(sequences)
        between_tokens = self.durations["itl"]
        for name in sequences:
            request = self.requests[name]
            before, request.last_token = request.last_token, time
            if before is not None:
                between_tokens.count(time - before)  # one for each token: too many to keep
                continue
            request.first_token = time
            if not request.forked:
                self.durations["ttft"].add(time - request.submitted)
                self.counts["prefilled"] += request.prompt_tokens

    def _on_finish(self, event: Event) -> None:
        request, tokens = self.requests.pop(event["request"]), event["tokens"]
        self.counts["running" if request.running else "waiting"] -= 1
        if not request.forked:
            self.durations["e2e"].add(event["time"] - request.submitted)
            self.counts[event["reason"]] += 1
        if tokens >= 2 and request.first_token is not None and request.last_token is not None:
            self.durations["tpot"].add((request.last_token - request.first_token) / (tokens - 1))

    def frozen(self) -> MetricsCollector:
        """A copy whose ``snapshot`` can be taken while this one goes on, so that a lock is held for the copy alone:
        at most some 40,000 numbers, a fraction of a millisecond, however long the engine has run."""
        return dataclasses.replace(self, requests={}, counts=self.counts.copy(), active=self.active.copy(),
                                   durations={name: each.copy() for name, each in self.durations.items()})

    def snapshot(self) -> Metrics:
        """The metrics now. O(K log K) for the K samples or buckets that are kept, some thousand at most, and O(steps)
        for the last 10,000: milliseconds, however long the engine has run."""
        counts, busy, header = self.counts, self.counts["busy_steps"], self.header
        elapsed = self.now - self.started if self.started is not None else 0.0
        page_bytes, num_pages = header.get("page_bytes", 0), header.get("num_pages", 0)
        sharing = header.get("settings", {}).get("prefix_sharing", False)
        return Metrics(
            submitted=counts["submitted"], refused=counts["refused"],
            finished={reason: counts[reason] for reason in FINISH_REASONS},
            running=counts["running"], waiting=counts["waiting"], steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"], output_tokens=counts["output_tokens"],
            computed_tokens=counts["computed"], found_tokens=counts["found"], elapsed_seconds=elapsed,
            tokens_per_second=counts["output_tokens"] / elapsed if elapsed > 0 else None,
            **{name: self.durations[name].summary() for name in ("ttft", "tpot", "e2e", "queue")},
            histograms={name: durations.histogram() for name, durations in self.durations.items()},
            batch_utilization=counts["scheduled"] / counts["offered"] if counts["offered"] else None,
            active_requests=tuple(self.active), active_peak=self.peaks[0], preemptions=counts["preemptions"],
            prefilled_tokens=counts["prefilled"], queried_tokens=counts["queried"] if sharing else 0,
            kv_pages=counts["used_pages"], kv_bytes=counts["used_pages"] * page_bytes,
            kv_peak_pages=counts["peak_pages"], kv_peak_bytes=counts["peak_pages"] * page_bytes,
            kv_usage=counts["used_pages"] / num_pages if num_pages else 0.0,
            fragmentation_mean=counts["empty_slots"] / busy if busy else None, fragmentation_peak=self.peaks[1],
            weight_bytes=header.get("weight_bytes", 0),
            model_name=str(header.get("scenario", header.get("checkpoint", ""))))
