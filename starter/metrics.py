"""M6 · What the numbers mean (T7). Every one is a function of timeline events and of nothing else, so anyone can
recompute it: ``Metrics.of(read_timeline("run.jsonl")) == engine.metrics()``.

    TTFT   time to first token: from submit to the first token, queueing included; one sample for each request that
           produced a token, however often it was preempted
    TPOT   time per output token: (last - first) / (n - 1); only of ended requests with n >= 2 tokens
    ITL    inter-token latency: between two tokens of a request that follow each other; so TPOT is the mean of its ITL
    E2E    from submit to the end, however it ended; queue time: from submit to the first admission
    batch utilization        scheduled tokens / budget, over the steps that scheduled anything
    active requests          requests with a chunk in a step
    KV pages and bytes       pages in use, a shared page counted once; bytes = pages * bytes of a page (what int8 pages
                             hold besides, while they are being filled, ``engine.kv.stats()`` tells)
    internal fragmentation   slots of used pages that hold no token, at the end of planning a step
    steps                    those completed: what an abandoned one was to compute is not in any of the above
    prefix cache             queries: prompt tokens that were looked up, at a first admission; hits: those found

``observe/prometheus.py`` writes what vLLM's servers export, under vLLM's names.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import Any

from .base.wings import picture
from .errors import SchemaError
from .timeline import FINISH_REASONS, Event

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
          1920.0, 7680.0)
BOUNDS = {"ttft": _SHORT, "itl": _TOKEN, "tpot": _TOKEN, "e2e": _WHOLE, "queue": _WHOLE}  # of the buckets, as in vLLM

COUNTS = ("submitted", "refused", *FINISH_REASONS, "prompt_tokens", "queried", "found", "prefilled", "output_tokens",
          "preemptions", "steps", "computed", "busy_steps", "scheduled", "offered", "empty_slots", "used_pages")


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
class Histogram:
    """Samples by size: ``counts[i]`` of them are at most ``bounds[i]``, the last of which is infinite (None)."""

    bounds: tuple[float | None, ...]
    counts: tuple[int, ...]
    sum: float

    @classmethod
    def of(cls, bounds: Sequence[float], numbers: Sequence[int], total: float) -> Histogram:
        """``numbers`` of samples between the bounds, below the first and above the last; and their sum."""
        return cls((*bounds, None), tuple(accumulate(numbers)), total)

    @property
    def count(self) -> int:
        """Samples."""
        return self.counts[-1]


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
    active_requests: tuple[int, ...]  # of every step
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
        """Fold a whole timeline. SchemaError where an event names a request that does not live."""
        collector = MetricsCollector()
        for number, event in enumerate(events, 1):
            try:
                collector.observe(event)
            except KeyError as error:
                raise SchemaError(f"event {number}, {event['event']}: there is no {error} here; is the timeline whole?"
                                  ) from None
        return collector.snapshot()

    def __repr__(self) -> str:
        return (f"<Metrics: {self.submitted} requests, {self.steps} steps, {self.output_tokens} tokens, "
                f"TTFT {self.ttft.p50} s, TPOT {self.tpot.p50} s (medians)>")

    def _repr_html_(self) -> str | None:
        return picture("metrics_table", self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``json.dumps``."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """One JSON document."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(slots=True)
class _Life:
    """What is remembered of a live request."""

    submitted: float
    prompt_tokens: int
    first: float | None = None  # token, when
    running: bool = False
    admitted: bool = False  # once, at least
    forked: bool = False  # a further sample of a request


@dataclass
class MetricsCollector:
    """Folds events one at a time: O(1) for each, O(chunks) for a step."""

    page_bytes: int = 0
    weight_bytes: int = 0
    num_pages: int = 0
    prefix_sharing: bool = False
    model_name: str = ""
    lives: dict[str, _Life] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # when each of them had its last token, but for those of
    latest: list[str] = field(default_factory=list)  # a step: they had theirs together, at
    latest_time: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    planned: Event | None = None  # the last step, counted already; it may be abandoned
    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BOUNDS if name != "itl"})
    buckets: dict[str, list[int]] = field(
        default_factory=lambda: {name: [0] * (len(bounds) + 1) for name, bounds in BOUNDS.items()})
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    active: list[int] = field(default_factory=list)
    started: float | None = None
    now: float = 0.0
    peak_pages: int = 0
    peak_empty: int = 0

    def __post_init__(self) -> None:
        self._handlers = {name[len("_on_"):]: getattr(self, name) for name in dir(self) if name.startswith("_on_")}

    def observe(self, event: Event) -> None:
        """Take one event into account; kinds without a handler carry nothing that is measured here."""
        self.now = event["time"]
        if handler := self._handlers.get(event["event"]):
            handler(event)

    def _on_header(self, event: Event) -> None:
        self.page_bytes = event["page_bytes"]
        self.weight_bytes = event["weight_bytes"]
        self.num_pages = event.get("num_pages", 0)
        self.prefix_sharing = event.get("settings", {}).get("prefix_sharing", False)
        self.model_name = str(event.get("scenario", event.get("checkpoint", "")))

    def _on_submit(self, event: Event) -> None:
        self.started = event["time"] if self.started is None else self.started
        self.counts["submitted"] += 1
        self.counts["prompt_tokens"] += len(event["prompt_tokens"])
        self.lives[event["request"]] = _Life(event["time"], len(event["prompt_tokens"]))

    def _on_fork(self, event: Event) -> None:
        parent = self.lives[event["parent"]]
        self.lives[event["request"]] = _Life(parent.submitted, parent.prompt_tokens, running=True, admitted=True,
                                             forked=True)

    def _on_refuse(self, event: Event) -> None:
        self.counts["refused"] += 1

    def _on_step(self, event: Event) -> None:
        self.active.append(len(event["chunks"]))
        for found in event["found"].values():
            self.counts["found"] += found
        for request in event["admitted"]:
            life = self.lives[request]
            if not life.admitted:
                self._sample("queue", event["time"] - life.submitted)
                self.counts["queried"] += life.prompt_tokens * self.prefix_sharing
            life.running = life.admitted = True
        for request in event["preempted"]:
            self.lives[request].running = False
            self.counts["preemptions"] += 1
        self.planned = event
        self._count_step(event, 1)

    def _on_abandon(self, event: Event) -> None:
        if self.planned:
            self._count_step(self.planned, -1)
            self.planned = None
            self.active.pop()

    def _count_step(self, step: Event, times: int) -> None:
        counts, chunks = self.counts, step["chunks"]
        counts["steps"] += times
        counts["computed"] += times * step["computed"]
        if chunks:
            scheduled = sum(count for _, _, count, _ in chunks)
            counts["busy_steps"] += times
            counts["scheduled"] += times * scheduled
            counts["offered"] += times * step["budget"]
            counts["empty_slots"] += times * step["empty_slots"]
            self.peak_empty = max(self.peak_empty, step["empty_slots"])

    def _on_pages(self, event: Event) -> None:
        self.counts["used_pages"] = event["used_pages"]
        self.peak_pages = max(self.peak_pages, event["used_pages"])

    def _on_token(self, event: Event) -> None:
        self.tokens([event["request"]], event["time"])

    def tokens(self, sequences: list[str], time: float) -> None:
        """Each of these has a new token. Most steps only decode: the same have one as in the step before."""
        self.now = time
        self.counts["output_tokens"] += len(sequences)
        if sequences == self.latest:
            self.buckets["itl"][bisect_left(BOUNDS["itl"], time - self.latest_time)] += len(sequences)
        else:
            self._note_latest()
            for sequence in sequences:
                self._token(sequence, time)
        self.latest, self.latest_time = sequences, time

    def _note_latest(self) -> None:
        self.last.update(dict.fromkeys(self.latest, self.latest_time))
        self.latest = []

    def _token(self, sequence: str, time: float) -> None:
        life, before = self.lives[sequence], self.last.get(sequence)
        self.last[sequence] = time
        if before is not None:
            self.buckets["itl"][bisect_left(BOUNDS["itl"], time - before)] += 1
            return
        life.first = time
        if not life.forked:
            self._sample("ttft", time - life.submitted)
            self.counts["prefilled"] += life.prompt_tokens

    def _on_finish(self, event: Event) -> None:
        self._note_latest()
        life = self.lives.pop(event["request"])
        self.counts[event["reason"]] += not life.forked
        if not life.forked:
            self._sample("e2e", event["time"] - life.submitted)
        if life.first is not None:
            lasted = self.last.pop(event["request"]) - life.first
            self.sums["itl"] += lasted  # all its times between tokens
            if event["tokens"] >= 2:
                self._sample("tpot", lasted / (event["tokens"] - 1))

    def _sample(self, name: str, seconds: float) -> None:
        self.samples[name].append(seconds)
        self._count(name, seconds)

    def _count(self, name: str, seconds: float) -> None:
        """In the histogram."""
        self.buckets[name][bisect_left(BOUNDS[name], seconds)] += 1
        self.sums[name] += seconds

    def snapshot(self) -> Metrics:
        """The metrics now. O(samples log samples)."""
        self._note_latest()
        counts, busy = self.counts, self.counts["busy_steps"]
        elapsed = self.now - self.started if self.started is not None else 0.0
        running = sum(life.running for life in self.lives.values())
        lasted = sum(self.last[name] - life.first for name, life in self.lives.items() if life.first is not None)
        sums = self.sums | {"itl": self.sums["itl"] + lasted}
        return Metrics(
            submitted=counts["submitted"], refused=counts["refused"],
            finished={reason: counts[reason] for reason in FINISH_REASONS},
            running=running, waiting=len(self.lives) - running, steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"], output_tokens=counts["output_tokens"],
            computed_tokens=counts["computed"], found_tokens=counts["found"], elapsed_seconds=elapsed,
            tokens_per_second=counts["output_tokens"] / elapsed if elapsed > 0 else None,
            **{name: Summary.of(samples) for name, samples in self.samples.items()},
            histograms={name: Histogram.of(bounds, self.buckets[name], sums[name])
                        for name, bounds in BOUNDS.items()},
            batch_utilization=counts["scheduled"] / counts["offered"] if busy else None,
            active_requests=tuple(self.active), preemptions=counts["preemptions"],
            prefilled_tokens=counts["prefilled"], queried_tokens=counts["queried"],
            kv_pages=counts["used_pages"], kv_bytes=counts["used_pages"] * self.page_bytes,
            kv_peak_pages=self.peak_pages, kv_peak_bytes=self.peak_pages * self.page_bytes,
            kv_usage=counts["used_pages"] / self.num_pages if self.num_pages else 0.0,
            fragmentation_mean=counts["empty_slots"] / busy if busy else None, fragmentation_peak=self.peak_empty,
            weight_bytes=self.weight_bytes, model_name=self.model_name)
