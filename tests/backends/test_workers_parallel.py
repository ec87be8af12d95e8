"""Several processes compute what one computes, bit by bit, wherever the pages are and whoever ends.

The processes here are objects of this one (``test_workers.py`` has real ones): what they are told and answer goes
through ``pickle`` all the same, and they can be ended at any moment.
"""

from __future__ import annotations

import gc
import pickle
import random
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from starter.backend import Batch, Piece, load_backend
from starter.backends.workers.parallel import ParallelModel, ParallelStore
from starter.backends.workers.process import Shelves, WorkerLost
from starter.base.fault_kinds import BackendFault, NanLogits
from starter.calibration.importance import column_importance
from starter.command.play import play, tokens_of
from starter.engine import InferenceEngine
from starter.errors import BackendError
from starter.kv_cache import KVStore
from starter.model import Loaded, Model, load_scenario_model
from starter.schema import EngineSettings, SamplingParams, load_scenario
from starter.timeline import VirtualClock
from tests.extras import needs
from tests.paths import FIXTURE
from tests.support import CONFIG, FIVE, HEALTHY, ROOMY, SERVINGS, TIGHT, TOKENIZER, WEIGHTS, Ask, EngineCase, prompt_of
from tests.test_backend import check_operations

TOKENS = (4, 15, 9)
LANES = Model(CONFIG, WEIGHTS, load_backend("cpu"))


def sent(message: Any) -> Any:
    """As it is after its way through a pipe."""
    class Memory(bytearray):
        write = bytearray.extend

    memory = Memory()
    pickle.dump(message, memory, protocol=5)  # type: ignore[arg-type]
    return pickle.loads(memory)


class Neighbour(Shelves):
    """Stands for a child process. ``patience`` is how many more messages it lives."""

    def __init__(self, name: str, model: Model) -> None:
        super().__init__(sent(model))
        self.name, self.patience = name, 10**9

    def __str__(self) -> str:
        return self.name

    @property
    def alive(self) -> bool:  # type: ignore[override]
        return self.patience > 0

    def close(self) -> None:
        self.patience = 0

    def ask(self, name: str, *arguments: Any) -> Callable[[], Any]:
        if not self.alive:
            raise WorkerLost(self.name)
        self.patience -= 1
        answer = super().ask(name, *sent(arguments))  # what it does last nobody hears of
        return (lambda: sent(answer())) if self.alive else self.silence

    def silence(self) -> None:
        raise WorkerLost(self.name)


def crew(processes: int = 2, model: Model = HEALTHY.model) -> ParallelModel:
    """A model on so many processes, the others played by Neighbours."""
    with mock.patch("starter.backends.workers.parallel.Worker", Neighbour):
        return ParallelModel(model, processes)


def engine_on(model: Model, **settings: object) -> InferenceEngine:
    return InferenceEngine(Loaded(model, TOKENIZER, {}), EngineSettings().override(settings), VirtualClock())


@contextmanager
def losses() -> Iterator[list[str]]:
    """The warnings of ended processes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told: list[str] = []
        yield told
        told += (str(warning.message) for warning in caught)


def random_run(model: Model, seed: int) -> tuple[list[object], InferenceEngine]:
    """Requests of all kinds come, are cancelled and meet faults, in too few pages; everything that can be observed
    (the tails of int8 pages apart)."""
    dice = random.Random(seed)
    settings = {**dice.choice((TIGHT, ROOMY)), **dice.choice(SERVINGS), "max_running": dice.randint(2, 6),
                "kv_quantization": dice.choice((None, "int8"))}
    engine = engine_on(model, **settings)
    engine.inject([BackendFault(dice.randint(0, 20)), NanLogits(dice.randint(0, 20), f"r{dice.randint(0, 7)}")])
    prefix, seen = prompt_of(dice, 8), []
    for number in range(8):
        prompt = prefix[:dice.randint(1, 8)] + prompt_of(dice, dice.randint(0, 3))
        sampling = SamplingParams(dice.choice((0.0, 1.2)), seed=number, n=dice.choice((1, 1, 2, 3)))
        Ask(prompt, dice.randint(1, 6), sampling).submit(engine, f"r{number}")
        for _ in range(dice.randint(0, 3)):
            seen.append(engine.step())
        if dice.random() < 0.2:
            engine.cancel(f"r{dice.randint(0, number)}")
    while engine.active:
        seen.append(engine.step())
        engine.kv.check()
    events = [engine.poll(f"r{number}") for number in range(8)]
    stats = replace(engine.kv.stats(), peak_tail_bytes=0)
    return [events, seen, stats, engine.metrics()], engine


class SameBits(EngineCase):
    def test_random_schedules(self) -> None:
        """Chunked prefill, sharing, forks, both preemptions, int8 pages, cancels, faults: all as in one process."""
        total: Counter[str] = Counter()
        for seed in range(8):
            for base in (HEALTHY.model, LANES):
                with self.subTest(seed=seed, model=base.backend):
                    expected, alone = random_run(base, seed)
                    model = crew(2 + seed % 2, base)
                    got, engine = random_run(model, seed)
                    self.assertEqual(got, expected)
                    self.assertEqual(engine.kv.stats(), alone.kv.stats())  # tails, too, while no process ends
                    self.assertGreater(min(work.tokens for work in model.work), 0)
                    stats = engine.kv.stats()
                    total.update(brought=sum(work.pages for work in model.work), swaps=stats.swaps_out,
                                 copies=stats.copies, hits=stats.hits, tails=stats.peak_tail_bytes,
                                 preemptions=engine.metrics().preemptions)
        self.assertGreater(min(total.values()), 10, total)  # the test tests what it says

    def test_random_schedules_whose_processes_end(self) -> None:
        """At any message, one after the other: nobody notices but whoever reads the warnings."""
        ended = 0
        for seed in range(100, 112):
            base = (HEALTHY.model, LANES)[seed % 2]
            with self.subTest(seed=seed, model=base.backend), losses() as told:
                expected, _ = random_run(base, seed)
                model, dice = crew(3, base), random.Random(seed)
                children = [member for member in model.crew if isinstance(member, Neighbour)]
                for child in children:
                    child.patience = dice.randint(1, 25)
                got, _ = random_run(model, seed)
                self.assertEqual(got, expected)
            dead = sum(not child.alive for child in children)
            self.assertEqual(len(told), dead, told)
            ended += dead
        self.assertGreater(ended, 12)

    def test_a_recomputation_that_fails_is_not_counted_on(self) -> None:
        """A process has ended; computing again what it held fails once before it has begun."""
        prompts = [[3 + i, *range(4, 12)] for i in range(4)]
        for kv_quantization in (None, "int8"):
            settings = {"page_size": 4, "num_pages": 60, "kv_quantization": kv_quantization}
            with self.subTest(kv_quantization=kv_quantization), engine_on(LANES, **settings) as alone:
                wanted = alone.generate(prompts, 12)
                model, failures = crew(2, LANES), [OSError("once")]
                forward = Model.forward

                def failing_once(*arguments: Any) -> Any:
                    if failures and not model.crew[1].alive:  # noqa: B023 - used before the next turn
                        raise failures.pop()  # noqa: B023
                    return forward(*arguments)  # noqa: B023

                with losses(), engine_on(model, **settings) as engine, \
                        mock.patch.object(Model, "forward", failing_once):
                    ids = [engine.submit(prompt, 12) for prompt in prompts]
                    for _ in range(4):
                        engine.step()
                    model.crew[1].close()
                    engine.run()
                    self.assertEqual([[event.token for event in engine.stream(i)] for i in ids], wanted)
                self.assertEqual(failures, [])

    def test_a_step_that_is_interrupted(self) -> None:
        """A child's answer that nobody waited for is not taken for another."""
        for k in range(10):
            with self.subTest(k=k):
                engine = engine_on(crew(), **TIGHT)
                self.submit(engine, FIVE)
                for _ in range(k):
                    engine.step()
                with mock.patch.object(Model, "forward", side_effect=KeyboardInterrupt):
                    self.assertRaises(KeyboardInterrupt, engine.step)
                self.check_outcomes(engine, FIVE)

    @needs("numpy", "numpy")
    def test_numpy(self) -> None:
        """Equal greedy tokens, as numpy promises for any batch."""
        scenario = load_scenario(FIXTURE)
        for kv in (None, "int8"):
            loaded = load_scenario_model(scenario, "numpy")
            tokens = []
            for model in (loaded.model, crew(2, loaded.model)):
                engine = InferenceEngine(Loaded(model, loaded.tokenizer, loaded.about),
                                         scenario.engine.override({"kv_quantization": kv}), VirtualClock())
                tokens.append(tokens_of([event for played in play(engine, scenario) for event in played.events]))
            self.assertEqual(*tokens)


class Sharing(EngineCase):
    """Who computes what."""

    def test_new_requests_are_dealt_out_and_stay_where_they_are(self) -> None:
        model = crew(2)
        engine = engine_on(model)
        for name in "abcd":
            Ask((3, 1, ord(name) % 7), 12).submit(engine, name)
        engine.run()
        self.assertEqual([(work.pieces, work.pages) for work in model.work], [(2 * 12, 0), (2 * 12, 0)])

    def test_samples_of_one_prompt_are_spread(self) -> None:
        """Their pages are all in one process at first."""
        model = crew(2)
        engine = engine_on(model, page_size=4, num_pages=64)
        Ask((1, 2, 3, 4, 5), 9, SamplingParams(1.0, n=8)).submit(engine, "r")
        engine.run()
        one, other = model.work
        self.assertEqual(one.pieces + other.pieces, 1 + 8 * 8)
        self.assertLessEqual(abs(one.pieces - other.pieces), 1)
        self.assertLessEqual(one.pages + other.pages, 4 * 2)  # four of them move, with two pages each, once

    def test_who_is_left_is_spread_anew(self) -> None:
        model = crew(2)
        engine = engine_on(model, **ROOMY)
        for i, max_tokens in enumerate((30, 2, 30, 2)):  # the long ones meet in one process
            Ask((i,), max_tokens).submit(engine, f"r{i}")
        for _ in range(6):
            engine.step()
        before = [work.pieces for work in model.work]
        for _ in range(5):
            engine.step()
        self.assertEqual([work.pieces - earlier for work, earlier in zip(model.work, before)], [5, 5])

    def test_a_process_that_lacks_many_pages_is_no_help(self) -> None:
        """Moving costs more than it saves."""
        model = crew(2)
        store = model.new_store(200, 1)
        long = [Piece([1] * 80, 0, range(80), False), Piece([2] * 80, 0, range(80, 160), False)]
        model.forward(Batch.of(long[:1], 1), store)
        model.forward(Batch.of(long[1:], 1), store)  # alone, it is computed where the first one was
        pieces = [Piece([3], 80, [*range(80), 190], True), Piece([3], 80, [*range(80, 160), 191], True)]
        self.assertEqual(model._share_out(pieces, store), [0, 0])
        self.assertEqual(model._share_out([*pieces, Piece([3] * 9, 0, range(192, 200), True)], store), [0, 0, 1])

    def test_a_context_in_two_places(self) -> None:
        """A table over a page of each of two processes: one page travels."""
        for kv in (None, "int8"):
            with self.subTest(kv=kv):
                first, second = [1, 2, 3, 4], [5, 6, 7, 8]
                mixed = Piece([9, 9], 8, (0, 1, 4), True)
                batches = [Batch.of([Piece(first, 0, (0,), False), Piece(first, 0, (2,), True)], 4),
                           Batch.of([Piece(second, 4, (0, 3), False), Piece(second, 4, (2, 1), False)], 4),
                           Batch.of([mixed], 4)]
                expected, got, model = [], [], crew(2)
                for rows, computing in ((expected, HEALTHY.model), (got, model)):
                    store = computing.new_store(5, 4, kv)
                    rows += (computing.forward(batch, store) for batch in batches)
                self.assertEqual(got, expected)
                self.assertEqual([(work.pieces, work.pages) for work in model.work], [(3, 1), (2, 0)])

    def test_calibration_sees_every_row(self) -> None:
        texts = [[1, 2, 3], [4, 5]]
        self.assertEqual(column_importance(crew(2), texts), column_importance(HEALTHY.model, texts))


class Pages(EngineCase):
    """The store as a page manager sees it."""

    def test_it_has_every_operation_of_a_store(self) -> None:
        check_operations(self, ParallelStore, KVStore)

    def on_both(self, kv_quantization: str | None = None) -> tuple[ParallelModel, ParallelStore]:
        """Pages 0 and 1 computed by the parent, 2 and 3 by the child, from the same three tokens."""
        model = crew(2)
        store = model.new_store(6, 2, kv_quantization)
        batch = Batch.of([Piece(TOKENS, 0, pages, False) for pages in ((0, 1), (2, 3))], 2)
        model.forward(batch, store)
        self.assertEqual([work.pieces for work in model.work], [1, 1])
        return model, store

    def test_reading_and_copying_wherever_a_page_is(self) -> None:
        model, store = self.on_both()
        host = model.new_store(2, 2)
        plain = HEALTHY.model.new_store(2, 2)
        HEALTHY.model.forward(Batch.of([Piece(TOKENS, 0, (0, 1), False)], 2), plain)
        for page in (0, 2):
            self.assertEqual(store.read(page, 1), plain.read(0, 1))
            store.copy_page(page, 4)
            host.copy_page(page, 1, store)
            store.copy_page(1, 5, host)
            for where, copied in ((store, 4), (host, 1), (store, 5)):
                self.assertEqual(where.read(copied, 1), plain.read(0, 1))

    def test_numbers_that_came_from_no_token(self) -> None:
        """They can be written into any page, and are lost with their process, which is said."""
        model, store = self.on_both()
        key, value = [[float(i) for i in range(store.width)] for _ in range(2)]
        store.write(3, 1, key, value)
        store.write(5, 0, value, key)
        self.assertEqual((store.read(3, 1), store.read(5, 0)), ((key, value), (value, key)))
        piece = Piece([1], 4, (2, 3, 4), True)
        model.forward(Batch.of([piece], 2), store)
        with losses() as told:
            model.crew[1].close()
            self.assertEqual(store.read(5, 0), (value, key))
            self.assertRaisesRegex(BackendError, "page 3 were lost with their process", store.read, 3, 1)
            with self.assertRaisesRegex(BackendError, "page 3 was lost .* not computed from tokens"):
                model.forward(Batch.of([Piece([1], 4, (3, 2, 4), True)], 2), store)
        self.assertEqual(told, ["worker 1; the other processes go on, and compute again what it held"])

    def test_a_lost_page_that_was_copied_or_swapped_is_computed_again(self) -> None:
        """Its tokens went with the copy."""
        model, store = self.on_both()
        host = model.new_store(2, 2)
        model.crew[1].close()
        for i, page in enumerate((2, 3)):
            host.copy_page(page, i, store)
        for i, page in enumerate((4, 5)):
            store.copy_page(i, page, host)
        with losses():
            got = model.forward(Batch.of([Piece([7], 3, (4, 5), True)], 2), store)
        self.assertEqual(got, [HEALTHY.model.forward_uncached([*TOKENS, 7])])
        self.assertEqual(model.work[0].tokens, 3 + 4)

    def test_no_tail_of_an_int8_page_stays(self) -> None:
        """In no process, wherever pages were moved."""
        model = crew(2)
        engine = engine_on(model, **{**ROOMY, "kv_quantization": "int8"})
        Ask((1, 2, 3, 4, 5), 9, SamplingParams(1.0, n=8)).submit(engine, "r")
        engine.run()
        store = engine.kv.store
        self.assertGreater(sum(work.pages for work in model.work), 0)
        for process, member in enumerate(model.crew):
            store.pass_on_drops(process)
            self.assertEqual(member.stores[store.key].tails, {})
        self.assertFalse(store._tails)

    def test_nor_that_of_a_page_that_was_computed_again(self) -> None:
        model, store = self.on_both("int8")
        model.crew[1].close()
        with losses():
            model.forward(Batch.of([Piece([7], 3, (2, 3), True)], 2), store)
        store.pass_on_drops(0)
        self.assertEqual((store._tails, set(store.local.tails)), ({0, 1, 3}, {0, 1, 3}))

    def test_a_store_that_nobody_uses_is_given_up(self) -> None:
        model = crew(2)
        self.assertEqual(model.forward_uncached([1, 2, 3]), HEALTHY.model.forward_uncached([1, 2, 3]))
        gc.collect()
        self.assertEqual([len(member.stores) for member in model.crew], [0, 0])

    def test_errors_of_a_child_concern_their_requests_alone(self) -> None:
        model = crew(2)
        forward = Neighbour.forward

        def failing(self: Neighbour, key: Any, pieces: Sequence[Piece]) -> Any:
            if any(9 in piece.tokens for piece in pieces):
                raise OSError("no luck with token 9")
            return forward(self, key, pieces)

        with mock.patch.object(Neighbour, "forward", failing):
            engine = engine_on(model, **ROOMY)
            asks = {"a": Ask((1, 2), 4), "b": Ask((9,), 4), "c": Ask((3,), 4)}
            self.submit(engine, asks)
            engine.run()
            for name in "ac":
                self.check_ask(engine.poll(name), name, asks[name])
            self.assertEqual(len(engine.poll("b")), 4)  # tried alone, it went to the parent, who has luck


if __name__ == "__main__":
    unittest.main()
