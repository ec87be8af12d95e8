"""A stream of requests in real time, and four ways to serve it: who comes later, and who wants how much, is not known.

    arrivals   r1 r2  r3   r4 ...             each with a prompt and a number of tokens that it wants
    static     [r1 r2 r3 until the longest ends] [r4 ... until the longest ends] ...
    continuous  r1 and r2 step by step, r3 joins, r2 ends, r4 takes its place ...

A static batch takes whoever has come, up to ``LIMIT``; what it computes for those that have what they want is waste.
Throughput counts wanted tokens from the first arrival to the last end; latency is from a request's arrival to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep

from scripts.peers import Transformers
from starter.engine import InferenceEngine
from starter.errors import BackendError
from starter.model import Loaded
from starter.schema import EngineSettings, ModelConfig, Request, SamplingParams
from starter.workloads.draw import Workload, generate_requests

LIMIT = 32  # requests at a time, for everybody
WORKLOAD = Workload(seed=1, requests=64, arrivals="poisson", rate=0.25, prompt=(16, 128), output=(8, 256))
STEP_SECONDS = 0.001  # of a step of the workload: a request every 4 ms, faster than anybody here can serve them
Ended = tuple[int, list[int]]  # number of the request, its tokens


@dataclass
class Arrival:
    """A request, and when it comes: seconds after the first."""

    seconds: float
    prompt: Sequence[int]
    wanted: int


def stream(config: ModelConfig, workload: Workload = WORKLOAD) -> list[Arrival]:
    """The workload's requests in the order of their arrival."""
    requests: Sequence[Request] = generate_requests(workload, config)[0]
    return [Arrival(request.arrival * STEP_SECONDS, request.prompt_tokens, request.max_tokens) for request in requests]


class Server:
    """Serves the stream once a round; ``tokens`` are the last round's, by the number of the request."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.arrivals = arrivals
        self.tokens: dict[int, list[int]] = {}
        self._latencies: list[float] = []

    def __call__(self) -> float:
        self.tokens, ended = {}, {}
        start = perf_counter()
        for i, tokens in self.serve(start):
            self.tokens[i], ended[i] = tokens, perf_counter() - start
        self._latencies.append(median(ended[i] - arrival.seconds for i, arrival in enumerate(self.arrivals)))
        return sum(map(len, self.tokens.values())) / max(ended.values())

    @property
    def latency(self) -> float:
        """Seconds from a request's arrival to its end: the median of the rounds' medians."""
        return median(self._latencies)

    def serve(self, start: float) -> Iterator[Ended]:
        """Every request when it ends."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing runs between rounds, if not said otherwise."""

    def wait(self, start: float, first: int) -> int:
        """Sleep until request ``first`` is there; the number of those that are."""
        sleep(max(0.0, self.arrivals[first].seconds - (perf_counter() - start)))
        return self.come(start)

    def come(self, start: float) -> int:
        """How many have come."""
        now = perf_counter() - start
        return sum(arrival.seconds <= now for arrival in self.arrivals)


class OurServer(Server):
    """Our engine, batching "continuous" or "static"; every token is read in the step that brings it."""

    def __init__(self, arrivals: Sequence[Arrival], loaded: Loaded, batching: str) -> None:
        super().__init__(arrivals)
        slots = max(len(arrival.prompt) + arrival.wanted for arrival in arrivals)
        self.engine = InferenceEngine(loaded, EngineSettings(
            page_size=16, num_pages=LIMIT * -(-slots // 16), max_running=LIMIT, budget_tokens=256, batching=batching))

    def serve(self, start: float) -> Iterator[Ended]:
        tokens: dict[int, list[int]] = {}
        there = 0
        while there < len(self.arrivals) or not self.engine.scheduler.idle:
            before, there = there, self.wait(start, there) if self.engine.scheduler.idle else self.come(start)
            for i in range(before, there):
                self.engine.submit(self.arrivals[i].prompt, self.arrivals[i].wanted, request_id=f"{i}",
                                   sampling=SamplingParams(ignore_eos=True))
            for chunk in self.engine.step().chunks:
                i = int(chunk.request_id)
                events = self.engine.poll(chunk.request_id)
                tokens.setdefault(i, []).extend(event.token for event in events if event.token is not None)
                if events and events[-1].finish_reason:
                    yield i, tokens.pop(i)

    def close(self) -> None:
        self.engine.close()


class StaticServer(Server):
    """transformers' ``generate``, a batch after the other."""

    def __init__(self, arrivals: Sequence[Arrival], peer: Transformers) -> None:
        super().__init__(arrivals)
        self.peer = peer

    def serve(self, start: float) -> Iterator[Ended]:
        served = 0
        while served < len(self.arrivals):
            batch = range(served, min(self.wait(start, served), served + LIMIT))
            rows = self.peer.generate([self.arrivals[i].prompt for i in batch],
                                      max(self.arrivals[i].wanted for i in batch))
            for i, row in zip(batch, rows):
                yield i, row[:self.arrivals[i].wanted]
            served = batch.stop


class ContinuousServer(Server):
    """transformers' continuous batching: its manager computes in a thread of its own, and we wait for its results."""

    def __init__(self, arrivals: Sequence[Arrival], peer: Transformers) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        super().__init__(arrivals)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it misses psutil, loudly
        slots = max(len(arrival.prompt) + arrival.wanted for arrival in arrivals)
        self.manager = peer.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(page_size=16, num_blocks=LIMIT * -(-slots // 16), max_batch_tokens=256,
                                     max_requests_per_batch=LIMIT, allow_block_sharing=False))
        self.manager.start()

    def serve(self, start: float) -> Iterator[Ended]:
        there = ended = 0
        while ended < len(self.arrivals):
            before, there = there, self.come(start)
            for i in range(before, there):
                self.manager.add_request(list(self.arrivals[i].prompt), f"{i}", self.arrivals[i].wanted)
            next_one = self.arrivals[there].seconds - (perf_counter() - start) if there < len(self.arrivals) else 1.0
            result = self.manager.get_result(timeout=max(next_one, 1e-3))
            if result is not None and result.is_finished():
                if result.error:
                    raise BackendError(f"transformers' continuous batching: {result.error}")
                ended += 1
                yield int(result.request_id), list(result.generated_tokens)
            elif not self.manager.is_running():
                raise BackendError("transformers' continuous batching has stopped by itself")

    def close(self) -> None:
        """End its thread."""
        self.manager.stop(block=True)
