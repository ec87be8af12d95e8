"""M6 · What the numbers mean (T7). Every one is a function of timeline events and of nothing else, so anyone can
recompute it: ``Metrics.of(read_timeline("run.jsonl")) == engine.metrics()``.

    TTFT   time to first token: from submit to the first token, queueing included; one sample for each request that
           produced a token, however often it was preempted
    TPOT   time per output token: (last - first) / (n - 1); only of ended requests with n >= 2 tokens
    batch utilization        scheduled tokens / budget, over the steps that scheduled anything
    active requests          requests with a chunk in a step
    KV pages and bytes       pages in use, a shared page counted once; bytes = pages * bytes of a page
    internal fragmentation   slots of used pages that hold no token, at the end of planning a step
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from .timeline import Event

FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass(frozen=True)
class Summary:
    """Of a list of samples: how many, mean, percentiles (nearest rank), largest. None where there is no sample."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """O(n log n)."""
        if not samples:
            return cls()
        ordered = sorted(samples)
        p50, p90, p99 = (ordered[max(0, ceil(len(ordered) * share) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


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
    batch_utilization: float | None
    active_requests: tuple[int, ...]  # of every step
    preemptions: int
    kv_pages: int
    kv_bytes: int
    kv_peak_pages: int
    kv_peak_bytes: int
    fragmentation_mean: float | None  # slots, over the steps that scheduled anything
    fragmentation_peak: int
    weight_bytes: int  # of all matrices, in the form that is computed with

    @classmethod
    def of(cls, events: Iterable[Event]) -> Metrics:
        """Fold a whole timeline."""
        collector = MetricsCollector()
        for event in events:
            collector.observe(event)
        return collector.snapshot()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


@dataclass
class _Life:
    """What is remembered of a live request."""

    submitted: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    running: bool = False
    forked: bool = False  # a further sample of a request


@dataclass
class MetricsCollector:
    """Folds events one at a time: O(1) for each, O(chunks) for a step."""

    page_bytes: int = 0
    weight_bytes: int = 0
    lives: dict[str, _Life] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    started: float | None = None
    now: float = 0.0
    peak_pages: int = 0
    peak_empty: int = 0

    def observe(self, event: Event) -> None:
        """Take one event into account; kinds without a handler carry nothing that is measured here."""
        self.now = event["time"]
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler:
            handler(event)

    def _on_header(self, event: Event) -> None:
        self.page_bytes = event["page_bytes"]
        self.weight_bytes = event["weight_bytes"]

    def _on_submit(self, event: Event) -> None:
        self.started = event["time"] if self.started is None else self.started
        self.counts["submitted"] += 1
        self.counts["prompt_tokens"] += len(event["prompt_tokens"])
        self.lives[event["request"]] = _Life(event["time"])

    def _on_fork(self, event: Event) -> None:
        self.lives[event["request"]] = _Life(self.lives[event["parent"]].submitted, running=True, forked=True)

    def _on_refuse(self, event: Event) -> None:
        self.counts["refused"] += 1

    def _on_step(self, event: Event) -> None:
        self.counts["steps"] += 1
        self.counts["computed"] += event["computed"]
        self.counts["found"] += sum(event["found"].values())
        self.counts["preemptions"] += len(event["preempted"])
        self.active.append(len(event["chunks"]))
        for request in event["admitted"]:
            self.lives[request].running = True
        for request in event["preempted"]:
            self.lives[request].running = False
        if event["chunks"]:
            self.counts["scheduled"] += sum(count for _, _, count, _ in event["chunks"])
            self.counts["offered"] += event["budget"]
            self.counts["empty_slots"] += event["empty_slots"]
            self.counts["busy_steps"] += 1
            self.peak_empty = max(self.peak_empty, event["empty_slots"])

    def _on_pages(self, event: Event) -> None:
        self.counts["used_pages"] = event["used_pages"]
        self.peak_pages = max(self.peak_pages, event["used_pages"])

    def _on_token(self, event: Event) -> None:
        life = self.lives[event["request"]]
        self.counts["output_tokens"] += 1
        if life.first is None:
            life.first = event["time"]
            if not life.forked:
                self.ttft.append(life.first - life.submitted)
        life.last = event["time"]
        life.tokens += 1

    def _on_finish(self, event: Event) -> None:
        life = self.lives.pop(event["request"])
        self.counts[event["reason"]] += not life.forked
        if life.first is not None and life.tokens >= 2:
            self.tpot.append((life.last - life.first) / (life.tokens - 1))

    def snapshot(self) -> Metrics:
        """The metrics now. O(samples log samples)."""
        counts, busy = self.counts, self.counts["busy_steps"]
        elapsed = self.now - self.started if self.started is not None else 0.0
        running = sum(life.running for life in self.lives.values())
        return Metrics(
            submitted=counts["submitted"], refused=counts["refused"],
            finished={reason: counts[reason] for reason in FINISH_REASONS},
            running=running, waiting=len(self.lives) - running, steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"], output_tokens=counts["output_tokens"],
            computed_tokens=counts["computed"], found_tokens=counts["found"], elapsed_seconds=elapsed,
            tokens_per_second=counts["output_tokens"] / elapsed if elapsed > 0 else None,
            ttft=Summary.of(self.ttft), tpot=Summary.of(self.tpot),
            batch_utilization=counts["scheduled"] / counts["offered"] if busy else None,
            active_requests=tuple(self.active), preemptions=counts["preemptions"],
            kv_pages=counts["used_pages"], kv_bytes=counts["used_pages"] * self.page_bytes,
            kv_peak_pages=self.peak_pages, kv_peak_bytes=self.peak_pages * self.page_bytes,
            fragmentation_mean=counts["empty_slots"] / busy if busy else None, fragmentation_peak=self.peak_empty,
            weight_bytes=self.weight_bytes)
