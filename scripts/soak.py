"""Serve many small requests on one engine and watch its memory, which must not grow: a service runs for months.

    python3 scripts/soak.py                       a million requests, some minutes; exit code 1 if memory grows
    python3 scripts/soak.py --requests 50000 --backend numpy

The requests come in bursts while others run, in a pool of too few pages, on a virtual clock. Most are read to their
end. The others are what careless clients leave behind: cancelled while they wait or run, never read, read halfway and
dropped, polled once, refused. A listener of the timeline hears all events. At each tenth of the requests, a line shows

    memory     resident memory of the process, MiB (on systems that do not say, the most so far)
    objects    blocks of memory that Python's objects take, after a full garbage collection
    waiting    requests in the queue
    streams    requests with a stream: live, or with unread events
    past       requests whose status is remembered
    events     events of the timeline that are in memory, and that were recorded
    metrics    milliseconds that ``engine.metrics()`` takes

The engine keeps at most 10,000 events and 1,000 unread requests, so every bound is reached in the first fifth. From
there to the end, resident memory may grow by ``--margin`` MiB and the number of objects by 2%.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, guarded, run_program
from starter.engine import InferenceEngine
from starter.errors import QueueFullError, RequestError, SchemaError
from starter.schema import SamplingParams, parse_scenario
from starter.timeline import Event, VirtualClock

SCENARIO = {  # the smallest of models: what is watched is the engine around it
    "version": 1, "name": "soak",
    "model": {"vocab_size": 12, "width": 2, "layers": 1, "heads": 1, "kv_heads": 1, "ffn_width": 2, "max_context": 48,
              "rope_theta": 10000.0, "norm_eps": 1e-5, "tied_output": True, "bos_token": None, "eos_tokens": [0]},
    "weights": {"source": "seeded", "seed": 7},
    "tokenizer": {"characters": "abcdefghijkl", "specials": []},
    "engine": {"page_size": 4, "num_pages": 32, "budget_tokens": 64, "max_running": 16, "max_waiting": 12,
               "prefix_sharing": True},
    "requests": []}
SHARES = {"read": 50, "text": 8, "cancel": 14, "close": 4, "never": 10, "half": 5, "poll": 5, "refused": 4}  # percent
KEEP_EVENTS, MAX_UNREAD = 10_000, 1_000
LEAST = 50_000  # requests, for the bounds to be reached in a fifth of them
IN_FLIGHT = 24  # requests between their submit and what their client does next
BURST = 16
MORE_OBJECTS = 0.02  # allowed after the first fifth
MIB = 2**20
HEAD = " requests  memory  objects  waiting  streams   past  events of recorded  metrics"


class Reading(NamedTuple):
    """What there is after so many requests."""

    requests: int
    memory: int  # bytes
    objects: int
    waiting: int
    streams: int
    past: int
    events: int
    recorded: int
    metrics_seconds: float

    def __str__(self) -> str:
        return (f"{self.requests:9,} {self.memory / MIB:7.1f} {self.objects:8,} {self.waiting:8,} {self.streams:8,} "
                f"{self.past:6,} {self.events:7,} {self.recorded:11,} {self.metrics_seconds * 1e3:8.2f}")


@dataclass
class Soak:
    """An engine and its clients. What a client does is drawn; SHARES says how often."""

    requests: int
    backend: str = "cpu"
    keep_events: int = KEEP_EVENTS
    max_unread: int = MAX_UNREAD
    seed: int = 1
    ways: Counter[str] = field(default_factory=Counter)  # how many clients did what
    heard: Counter[str] = field(default_factory=Counter)  # events, by kind
    readings: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.engine = InferenceEngine.from_scenario(parse_scenario(json.dumps(SCENARIO)), self.backend,
                                                    clock=VirtualClock(), keep_events=self.keep_events,
                                                    max_unread=self.max_unread)
        self.engine.timeline.listen(self._hear)
        self._in_flight: deque[tuple[str, str]] = deque()  # what will be done to which request

    def _hear(self, event: Event) -> None:
        self.heard[event["event"]] += 1

    def run(self, show: Callable[[Reading], None] = lambda reading: None) -> None:
        """All requests; ``show`` is called with each tenth's reading."""
        for number in range(1, self.requests + 1):
            self._submit()
            if number % BURST == 0:
                self.engine.step()
            while len(self._in_flight) > IN_FLIGHT:
                self._go_on(*self._in_flight.popleft())
            if number * 10 // self.requests > (number - 1) * 10 // self.requests:
                self.readings.append(self._reading(number))
                show(self.readings[-1])

    def _submit(self) -> None:
        dice = self.dice
        [way] = dice.choices(tuple(SHARES), tuple(SHARES.values()))
        prompt = dice.choices(range(1, 12), k=dice.randint(1, 12))
        several = dice.random() < 0.02 and way != "text"
        sampling = SamplingParams(temperature=dice.choice((0.0, 0.8)), n=2 if several else 1,
                                  stop=dice.choice(((), ("ab",))))
        if way == "refused":
            prompt.append(dice.choice((12, -1)))  # no token of the model
        try:
            request_id = self.engine.submit(prompt, dice.randint(0, 8), sampling=sampling)
        except QueueFullError:
            self.ways["queue full"] += 1
            return
        except RequestError:
            self.ways[way] += 1
            return
        self.ways[way] += 1
        if way == "cancel" and dice.random() < 0.3:  # at once; the others when they run, or have ended
            self.engine.cancel(request_id)
        self._in_flight.append((way, request_id))

    def _go_on(self, way: str, request_id: str) -> None:
        """What the client does before it goes away. Only reading runs steps."""
        engine = self.engine
        if way == "read":
            engine.result(request_id)
        elif way == "text":
            "".join(engine.stream_text(request_id))
        elif way == "cancel":
            engine.cancel(request_id)
        elif way == "close":
            with engine.stream(request_id) as events:
                next(events)
        elif way == "half":
            next(engine.stream(request_id))
        elif way == "poll":
            engine.poll(request_id)

    def _reading(self, requests: int) -> Reading:
        gc.collect()
        engine, core = self.engine, self.engine._core
        start = time.perf_counter()
        metrics = engine.metrics()
        seconds = time.perf_counter() - start
        return Reading(requests, resident_bytes(), sys.getallocatedblocks(), metrics.waiting, len(core.streams),
                       len(core.past), len(engine.timeline), engine.timeline.recorded, seconds)

    def growth(self) -> tuple[int, float]:
        """From the first fifth to the end: bytes of resident memory, and objects as a share."""
        early, late = self.readings[1], self.readings[-1]
        return late.memory - early.memory, (late.objects - early.objects) / early.objects


def resident_bytes() -> int:
    """Of this process; where the system does not say, the most that it ever had."""
    if sys.platform == "win32":
        sizes = (ctypes.c_size_t * 10)()  # PROCESS_MEMORY_COUNTERS: cb and the page faults, the peak, the size now, ...
        process = ctypes.c_void_p(ctypes.windll.kernel32.GetCurrentProcess())
        ctypes.windll.psapi.GetProcessMemoryInfo(process, ctypes.byref(sizes), ctypes.sizeof(sizes))
        return int(sizes[2])
    import resource  # not on Windows
    with suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def verdict(soak: Soak, margin: float, console: Console) -> int:
    """Say how much grew, and return the exit code."""
    memory, objects = soak.growth()
    grew = memory > margin * MIB or objects > MORE_OBJECTS
    console.line(f"After the first fifth, memory grew by {memory / MIB:.1f} MiB (allowed: {margin:g}) and objects by "
                 f"{objects:.1%} (allowed: {MORE_OBJECTS:.0%}): {'it GROWS' if grew else 'bounded'}.")
    return EXIT_DIFFERS if grew else EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print a line for each tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, metavar="N", help="default: a million")
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="as for starter/driver.py; default: cpu")
    parser.add_argument("--margin", type=float, default=4.0, metavar="MIB",
                        help="how much resident memory may grow after the first fifth; default: 4")
    options = parser.parse_args(arguments)

    def work() -> int:
        if options.requests < LEAST:
            raise SchemaError(f"--requests must be at least {LEAST}, not {options.requests}: in a fifth of fewer the "
                              f"engine does not fill up to its bounds")
        soak, console = Soak(options.requests, options.backend), Console(sys.stdout)
        console.line(HEAD)
        with soak.engine:
            soak.run(lambda reading: console.line(str(reading)))
        return verdict(soak, options.margin, console)

    return guarded(work)


if __name__ == "__main__":
    run_program(main)
