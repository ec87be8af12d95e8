"""Random operations on random engines, everything checked after each: looks for what nobody thought of.

    python3 scripts/fuzz.py --seeds 200 --operations 100             20,000 operations
    python3 scripts/fuzz.py --first 1234 --seeds 1 --operations 100  replays seed 1234

A seed draws the settings (pages of floats or of int8, budget, policy, batching, preemption, prefix sharing, host
pages), faults (see ``starter/workloads/faults.py``), and operations: submit good and bad requests, step, cancel, read
events, and what an outside holder of pages may do. Every tenth seed runs the engine's own thread under several readers
instead. After every operation the pages must be conserved; at the end every stream must hold what its request yields
alone on a fresh engine (a prefix of it, if it was cancelled or hit), with one last event a sample, every page must be
free and nothing kept besides it. Nobody ends with an error but those that a fault, a memory cut or an outside holder
has hit.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from starter.backend import load_backend
from starter.base.console import Console
from starter.base.fault_kinds import AbnormalRelease, BackendFault, Fault, MemoryCut, NanLogits, RefusedPages
from starter.base.tokenizer import CharacterTokenizer
from starter.base.weights import seeded_weights
from starter.engine import InferenceEngine
from starter.errors import EngineError, RequestError
from starter.kv_cache import KVCacheManager, KVHandle
from starter.model import Loaded, Model
from starter.scheduler import POLICIES
from starter.schema import CharacterVocabulary, EngineSettings, ModelConfig, SamplingParams, TokenEvent, sample_id
from starter.timeline import Event, VirtualClock

CONTEXT, LONGEST = 32, 24  # of the model; of a request, prompt and output together
MANY_STEPS = 20_000  # more than any seed needs
CONFIG = ModelConfig(vocab_size=12, width=8, layers=2, heads=4, kv_heads=2, ffn_width=12, max_context=CONTEXT,
                     eos_tokens=(1,))
VOCABULARY = CharacterVocabulary("abcdefghij", ("<bos>", "<eos>"))
TOKENIZER = CharacterTokenizer(VOCABULARY, 0, CONFIG.eos_tokens)
MODEL = Model(CONFIG, seeded_weights(CONFIG, 5), load_backend("reference"))
BAD_REQUESTS: Sequence[tuple[object, object]] = (
    ([], 3), ([1, 12], 3), ([1, -1], 3), ([True], 3), (b"ab", 3), ("a?", 3), ([1], -1), ([1], 2.0), ([1], 10**18),
    ([2] * CONTEXT, 1))


@dataclass(frozen=True)
class Ask:
    """A good request."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_tokens: tuple[int, ...] = ()


def make_engine(settings: EngineSettings) -> InferenceEngine:
    """An engine over the tiny model; its clock counts steps."""
    return InferenceEngine(Loaded(MODEL, TOKENIZER, {}), settings, VirtualClock())


@lru_cache(maxsize=4096)
def alone(request_id: str, ask: Ask, int8_page_size: int | None = None
          ) -> tuple[tuple[tuple[int | None, float | None], ...], ...]:
    """What a request yields on a fresh engine with room for everything: (token, logprob) of each sample. Floats are
    the same on pages of any size; the grids of int8 depend on the page."""
    page_size = int8_page_size or CONTEXT
    settings = EngineSettings(page_size=page_size, num_pages=ask.sampling.n * -(-CONTEXT // page_size),
                              budget_tokens=CONTEXT, kv_quantization="int8" if int8_page_size else None)
    with make_engine(settings) as engine:
        engine.submit(ask.prompt, ask.max_tokens, request_id=request_id, sampling=ask.sampling,
                      stop_tokens=ask.stop_tokens)
        return by_sample(list(engine.stream(request_id)), ask.sampling.n)


def by_sample(events: Sequence[TokenEvent], n: int) -> tuple[tuple[tuple[int | None, float | None], ...], ...]:
    """(token, logprob) of each sample."""
    tokens = [event for event in events if event.token is not None]
    return tuple(tuple((event.token, event.logprob) for event in tokens if event.sample == i) for i in range(n))


def random_ask(rng: random.Random) -> Ask:
    """A request that begins like many others, sampled in one of many ways."""
    beginning = [2, 3, 2, 4, 2, 3, 2, 5, 6, 7][:rng.randint(0, 10)]
    prompt = [*beginning, *(rng.randrange(2, 12) for _ in range(rng.randint(0, 4)))] or [2]
    sampling = SamplingParams() if rng.random() < 0.5 else SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]), top_k=rng.choice([0, 3]), top_p=rng.choice([1.0, 0.8]),
        seed=rng.choice([None, 7]), repetition_penalty=rng.choice([1.0, 1.3]), presence_penalty=rng.choice([0.0, 0.5]),
        logit_bias={1: -2.0} if rng.random() < 0.3 else {}, min_tokens=rng.choice([0, 0, 3]),
        ignore_eos=rng.random() < 0.2, stop=rng.choice([(), (), ("ab", "c")]), n=rng.choice([1, 1, 2, 3]))
    return Ask(tuple(prompt), rng.randint(0, LONGEST - len(prompt)), sampling, rng.choice([(), (), (4,)]))


def random_settings(rng: random.Random) -> EngineSettings:
    """Settings under which every good request fits alone, often barely."""
    page_size, use_cache = rng.randint(1, 9), rng.random() < 0.95
    return EngineSettings(
        page_size=page_size, num_pages=-(-LONGEST // page_size) + rng.choice([0, 1, 3, 20]),
        budget_tokens=rng.choice([1, 2, 3, 5, 8, 13, 32]), max_running=rng.randint(1, 6),
        batching=rng.choice(["continuous"] * 6 + ["static", "none"]), policy=rng.choice(list(POLICIES)),
        preemption=rng.choice(["recompute", "swap"]), host_pages=rng.choice([0, 4, 64]),
        prefix_sharing=rng.random() < 0.6, use_cache=use_cache,
        kv_quantization=rng.choice([None, "int8"]) if use_cache else None)


def random_faults(rng: random.Random) -> list[Fault]:
    """A few faults, or none."""
    def request() -> str | None:
        return rng.choice([None, f"r{rng.randrange(20)}"])

    def cut() -> MemoryCut:
        step = rng.randrange(40)
        return MemoryCut(step, rng.randint(1, 8), step + rng.randint(1, 9))

    kinds: Sequence[Callable[[], Fault]] = (
        lambda: BackendFault(rng.randrange(60), request()), lambda: NanLogits(rng.randrange(60), request()),
        lambda: RefusedPages(rng.randrange(60)), lambda: AbnormalRelease(rng.randrange(40), f"r{rng.randrange(20)}"),
        cut)
    return [rng.choice(kinds)() for _ in range(rng.choice([0, 0, 1, 3]))]


@dataclass
class Excuses:
    """A timeline listener: which sequences something was done to that may end them with an error."""

    outside: Sequence[KVHandle]  # what an outside holder holds now
    excused: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)  # in this step
    cut_until: int = 0  # memory is cut until this step
    failed_calls: int = 0  # of the decoder, in this step

    def __call__(self, event: Event) -> None:
        if event["event"] == "step":
            self.computing, self.failed_calls = {chunk[0] for chunk in event["chunks"]}, 0
            if self.outside or event["step"] < self.cut_until:  # nobody who needs a page is sure to get it
                self.excused.update(event["waiting"], event["running"])
        elif event["event"] == "fault":
            self._hit(event["kind"], event["fault"])

    def _hit(self, kind: str, fault: dict[str, Any]) -> None:
        if kind == "MemoryCut":
            self.cut_until = max(self.cut_until, fault["until"])
        elif kind == "BackendFault":
            self.failed_calls += 1
            if fault["request_id"] is None and self.failed_calls == 1:
                return  # everybody is tried again, alone
        if kind in ("BackendFault", "NanLogits"):
            self.excused |= self.computing if fault["request_id"] is None else {fault["request_id"]}
        elif kind == "AbnormalRelease":
            self.excused.add(fault["request_id"])


@dataclass
class Fuzz:
    """One seed: an engine, the requests it was given, and what their readers have seen."""

    seed: int
    rng: random.Random = field(init=False)
    asks: dict[str, Ask] = field(default_factory=dict)
    seen: dict[str, list[TokenEvent]] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)  # with the number of events that were read before
    outside: list[KVHandle] = field(default_factory=list)
    excuses: Excuses = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.engine = make_engine(random_settings(self.rng))
        self.engine.timeline.listen(self.expect_an_end)
        self.excuses = Excuses(self.outside)
        self.engine.timeline.listen(self.excuses)

    @staticmethod
    def expect_an_end(event: Event) -> None:
        """A timeline listener: steps that go on for ever serve nobody."""
        assert event["step"] < MANY_STEPS, f"{MANY_STEPS} steps and no end"

    # ------------------------------------------------------------------------------------ operations

    def run(self, operations: int) -> None:
        """All operations, each followed by the check of the pages, then the reckoning."""
        faults = self.engine.inject(random_faults(self.rng))
        moves = [self.submit] * 4 + [self.submit_badly] + [self.step] * 8 + [self.cancel] + [self.read] * 3 \
            + [self.poll, self.hold, self.hold_a_fork, self.write_outside, self.let_go]
        for _ in range(operations):
            self.rng.choice(moves)()
            self.engine.kv.check()
        while self.outside:
            self.let_go()
        self.engine.run()
        faults.end()  # only now: a cut of memory may begin in the last steps
        self.reckon()

    def submit(self) -> None:
        request_id, ask = f"r{len(self.asks)}", random_ask(self.rng)
        self.engine.submit(ask.prompt, ask.max_tokens, request_id=request_id, sampling=ask.sampling,
                           stop_tokens=ask.stop_tokens, priority=self.rng.randint(-1, 1),
                           cache_salt=self.rng.choice([None, None, "salt"]))
        self.asks[request_id], self.seen[request_id] = ask, []

    def submit_badly(self) -> None:
        before = self.engine.active, self.engine.kv.stats()
        prompt, max_tokens = self.rng.choice(BAD_REQUESTS)
        try:
            self.engine.submit(prompt, max_tokens)  # type: ignore[arg-type]
        except RequestError:
            assert before == (self.engine.active, self.engine.kv.stats()), "a refused request changed the engine"
        else:
            raise AssertionError(f"accepted the bad request {prompt!r}, {max_tokens!r}")

    def step(self) -> None:
        budget = self.rng.choice([None, None, None, 0, 1, 2, 7])
        decision = self.engine.step(budget)
        assert decision.scheduled_tokens <= decision.budget_tokens, "more tokens than the budget"

    def unread(self) -> list[str]:
        return [request_id for request_id in self.asks if not self.ended(request_id)]

    def ended(self, request_id: str) -> bool:
        ends = sum(event.finish_reason is not None for event in self.seen[request_id])
        return ends == self.asks[request_id].sampling.n

    def cancel(self) -> None:
        if unread := self.unread():
            request_id = self.rng.choice(unread)
            if self.engine.status(request_id).finish_reason is None:
                self.cancelled[request_id] = len(self.seen[request_id])
            self.engine.cancel(request_id)

    def read(self) -> None:
        if unread := self.unread():
            request_id = self.rng.choice(unread)
            self.seen[request_id].append(next(self.engine.stream(request_id)))

    def poll(self) -> None:
        if unread := self.unread():
            request_id = self.rng.choice(unread)
            self.seen[request_id] += self.engine.poll(request_id)

    # ---------------------------------------------------------------------------- the outside holder

    def hold(self) -> None:
        with suppress(EngineError):
            self.outside.append(self.engine.kv.allocate("outside", self.rng.randint(0, self.engine.kv.page_size)))

    def hold_a_fork(self) -> None:
        running = [sequence_id for sequence_id in self.engine.scheduler.live
                   if self.engine.scheduler.is_running(sequence_id)]
        if running and self.engine.settings.use_cache:
            handle = self.engine.scheduler.handle(self.rng.choice(running))
            with suppress(EngineError):  # an abnormal release may have taken its pages away
                self.outside.append(self.engine.kv.fork(handle, "outside"))

    def write_outside(self) -> None:
        if self.outside:
            numbers = [1e6] * self.engine.kv.width  # would be noticed in anybody's logits
            with suppress(EngineError):
                self.engine.kv.append(self.rng.choice(self.outside), numbers, numbers)

    def let_go(self) -> None:
        if self.outside:
            self.engine.kv.release(self.outside.pop(self.rng.randrange(len(self.outside))))

    # ----------------------------------------------------------------------------------- the reckoning

    def reckon(self) -> None:
        """Everything is over: were the streams right, and is everything given back?"""
        for request_id, ask in self.asks.items():
            if not self.ended(request_id):
                self.seen[request_id] += self.engine.poll(request_id)
            check_stream(self.engine.settings, request_id, ask, self.seen[request_id], self.cancelled.get(request_id),
                         self.excuses.excused)
        check_nothing_is_held(self.engine.kv)
        assert not self.engine.active, f"still active: {self.engine.active}"
        metrics = self.engine.metrics()
        assert sum(metrics.finished.values()) == metrics.submitted == len(self.asks), "requests and endings differ"
        self.engine.close()


def check_nothing_is_held(kv: KVCacheManager) -> None:
    """Every page is free, and nothing is kept besides one."""
    kv.check()
    assert kv.free_pages == kv.total_pages, f"{kv.total_pages - kv.free_pages} pages are lost"
    assert kv.free_host_pages == kv.total_host_pages, "host pages are lost"
    for store in (kv.store, kv.host_store):
        tails = getattr(store, "tails", {})  # of int8 pages
        assert not tails, f"the tails of pages {sorted(tails)} are still kept"


def check_stream(settings: EngineSettings, request_id: str, ask: Ask, events: Sequence[TokenEvent],
                 cancelled: int | None, excused: Collection[str] = ()) -> None:
    """One last event a sample, indices without gaps, and the tokens that the request yields alone; after a cancel, when
    so many events had been read, none. No error without an excuse."""
    expected = alone(request_id, ask, settings.page_size if settings.kv_quantization else None)
    for number, got in enumerate(by_sample(events, ask.sampling.n)):
        mine = [event for event in events if event.sample == number]
        reasons = [event.finish_reason for event in mine]
        where = f"{request_id} sample {number}: "
        assert reasons and reasons[-1] and not any(reasons[:-1]), where + f"finish reasons {reasons}"
        assert [event.index for event in mine] == list(range(len(mine))), where + "indices have gaps"
        wanted = expected[number] if reasons[-1] in ("stop", "length") else expected[number][:len(got)]
        assert got == wanted, where + f"{got} instead of {wanted}"
        if reasons[-1] == "error":
            hit = {sample_id(request_id, i) for i in range(ask.sampling.n)}.intersection(excused)
            assert hit, where + f"ends with an error, and nothing was done to it: {mine[-1].error}"
        if reasons[-1] == "cancelled":
            assert cancelled is not None, where + "cancelled by nobody"
            late = [event.token for event in events[cancelled:] if event.sample == number]
            assert late == [None], where + f"{late} after the cancel"


def run_threads(seed: int) -> None:
    """Readers in threads of their own, the engine in its: each stream as if alone."""
    rng = random.Random(seed)
    problems: list[BaseException] = []
    with make_engine(random_settings(rng)) as engine:
        engine.start()

        def client(number: int) -> None:
            own = random.Random(seed * 1000 + number)
            try:
                for i in range(3):
                    request_id, ask = f"t{number}-{i}", random_ask(own)
                    engine.submit(ask.prompt, ask.max_tokens, request_id=request_id, sampling=ask.sampling,
                                  stop_tokens=ask.stop_tokens)
                    stop_after = own.choice([None, None, 2])
                    events: list[TokenEvent] = []
                    for event in engine.stream(request_id):
                        events.append(event)
                        if stop_after is not None and len(events) == stop_after:
                            engine_cancel(engine, request_id)
                    check_stream(engine.settings, request_id, ask, events, stop_after)
            except BaseException as problem:  # told by the main thread
                problems.append(problem)

        threads = [Thread(target=client, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        check_nothing_is_held(engine.kv)


def engine_cancel(engine: InferenceEngine, request_id: str) -> None:
    """Cancel, unless the stream was just read to its end."""
    with suppress(KeyError):
        engine.cancel(request_id)


def main() -> int:
    """Run the seeds; the first failure prints how to replay it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--operations", type=int, default=100, help="for each seed")
    options = parser.parse_args()
    if options.seeds < 1 or options.operations < 1:
        parser.error(f"--seeds and --operations are numbers from 1, not {options.seeds} and {options.operations}")
    console = Console(sys.stderr)
    for seed in range(options.first, options.first + options.seeds):
        try:
            with console.working(f"seed {seed}"):
                run_threads(seed) if seed % 10 == 9 else Fuzz(seed).run(options.operations)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"replay: python3 scripts/fuzz.py --first {seed} --seeds 1 --operations {options.operations}",
                  file=sys.stderr)
            return 1
    print(f"{options.seeds} seeds, {options.seeds * options.operations} operations: no page lost, no stream wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
