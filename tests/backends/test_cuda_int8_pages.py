"""Int8 pages on the CUDA backend, run by the processor: the plain store's numbers, and the promises of the engine
(extra ``cuda``, no GPU)."""

from __future__ import annotations

import gc
import json
import random
import unittest
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from math import nan
from typing import Any
from unittest import mock

from starter import InferenceEngine, driver, load_backend, load_scenario
from starter.backend import Batch, Piece
from starter.backends.int8_pages import Int8KVStore
from starter.base.model_config import QuantizationConfig
from starter.base.weights import seeded_weights
from starter.command.play import play, tokens_of
from starter.core import most_tails
from starter.errors import BackendError
from starter.kv_cache import KVStore
from starter.model import Model
from starter.schema import EngineSettings, SamplingParams
from tests.backends.test_int8_pages import INT8, solo
from tests.extras import needs
from tests.models import random_config, split_prompts
from tests.paths import FIXTURE
from tests.support import FIVE, SERVINGS, TIGHT, Ask, EngineCase, make_engine, outcome, prompt_of, run_main
from tests.test_backend import check_operations


def cuda(**options: Any) -> Any:
    return load_backend("cuda", device="cpu", **options)


@needs("cuda", "warp")
class CudaInt8StoreTest(unittest.TestCase):
    LAYERS, HEADS, WIDTH = 2, 3, 4

    def setUp(self) -> None:
        import numpy as np

        from starter.backends.cuda.device import Device
        from starter.backends.cuda.int8_pages import CudaInt8KVStore
        self.np, self.made, self.device = np, CudaInt8KVStore, Device("cpu")

    def make(self, num_pages: int = 5, page_size: int = 3, device: Any = None) -> Any:
        return self.made(device or self.device, self.LAYERS, self.HEADS, self.WIDTH, num_pages, page_size)

    def fill(self, store: Any, page: int, count: int, seed: int) -> list[tuple[list[float], list[float]]]:
        dice = random.Random(seed)
        tokens = [([dice.randrange(-99, 99) / 8 for _ in range(store.width)],
                   [dice.randrange(-99, 99) / 8 for _ in range(store.width)]) for _ in range(count)]
        for offset, token in enumerate(tokens):
            store.write(page, offset, *token)
        return tokens

    def keys(self, store: Any, page: int, count: int) -> list[list[float]]:
        return [store.read(page, offset)[0] for offset in range(count)]

    def test_it_has_every_operation_of_a_store(self) -> None:
        check_operations(self, self.made, KVStore)

    def test_the_same_numbers_as_the_plain_store_and_the_same_attention(self) -> None:
        """Random batches of two requests over pages that are reused, copied and settled, of numbers of every size; what
        is read, in double precision, is the same to the last bit, so codes, lows and scales are."""
        draws = (lambda rng: rng.gauss(0, 1), lambda rng: 50 + rng.random(), lambda rng: rng.gauss(0, 1e-39),
                 lambda rng: 0.0, lambda rng: rng.choice((1e-3, 30.0)))
        plain_backend = load_backend("reference")
        for seed in range(12):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                layers, heads, group, width = (rng.randint(1, 3) for _ in range(4))
                size, backend = rng.randint(1, 16), cuda(block=rng.choice((1, 32)))
                plain = Int8KVStore(layers, heads, width, 8, size)
                fast = self.made(backend.device, layers, heads, width, 8, size)
                lengths = [0, 0]
                for _ in range(10):
                    ends = [length + rng.randint(1, 2 * size) for length in lengths]
                    lengths = [0 if end > 4 * size else length for length, end in zip(lengths, ends)]
                    pieces = [Piece([0] * (end - length), length, range(4 * i, 4 * i + 4), False)
                              for i, (length, end) in enumerate(zip(lengths, ends)) if end <= 4 * size]
                    if not pieces:
                        continue
                    batch, kinds = Batch.of(pieces, size), [rng.choice(draws) for _ in range(heads * width)]
                    for layer in range(layers):
                        q, k, v = (self.np.array([[draw(rng) for draw in columns] for _ in batch.tokens],
                                                 self.np.float32)
                                   for columns in (draws[:1] * (heads * group * width), kinds, kinds))
                        wanted = plain_backend.attend((q / 9).tolist(), k.tolist(), v.tolist(), layer, plain, batch)
                        got = backend.attend(*map(backend.device.put, (q / 9, k, v)), layer, fast, batch)
                        self.assertLess(abs(got.numpy() - wanted).max(), 1e-4)
                    self.assertEqual({*fast.tails}, {*plain.tails})
                    for piece in pieces:
                        i, lengths[i] = (i := piece.pages[0] // 4), piece.start + len(piece.tokens)
                        for page, store in product(piece.pages[:lengths[i] // size], (plain, fast)):
                            store.drop_tail(page)
                    self.check_same(plain, fast, lengths)
                for store in (plain, fast):
                    store.copy_page(0, 7)
                    store.copy_page(4, 6)
                for page, offset in product((6, 7), range(min(size, *lengths))):
                    self.assertEqual(plain.read(page, offset), fast.read(page, offset))

    def check_same(self, plain: Any, fast: Any, lengths: Sequence[int]) -> None:
        for i, length in enumerate(lengths):
            for slot in range(length):
                at = 4 * i + slot // plain.page_size, slot % plain.page_size
                self.assertEqual(fast.read(*at), plain.read(*at))
        self.assertEqual((plain.width, plain.page_bytes, plain.tail_bytes, plain.peak_tails),
                         (fast.width, fast.page_bytes, fast.tail_bytes, fast.peak_tails))

    def test_a_copy_has_codes_and_tail_and_is_its_own(self) -> None:
        """Within a store, and to another one and back, as in swapping."""
        for there, count in product((False, True), (1, 2, 3)):
            with self.subTest(there=there, count=count):
                source, target = self.make(), self.make(num_pages=2)
                if not there:
                    target = source
                self.fill(source, 4, count, 0)
                if count == 3:
                    source.drop_tail(4)
                wanted = [source.read(4, offset) for offset in range(count)]
                self.fill(target, 1, 2, 9)  # an earlier owner, whose tail must go
                target.copy_page(4, 1, source)
                self.assertEqual(1 in target.tails, count < 3)
                self.fill(source, 4, 3, 5)
                self.assertEqual([target.read(1, offset) for offset in range(count)], wanted)
                source.copy_page(1, 0, target)
                self.assertEqual([source.read(0, offset) for offset in range(count)], wanted)

    def test_bytes_are_what_is_held(self) -> None:
        from starter.backends.cuda.device import Device
        for size in (1, 4, 16):
            device = Device("cpu")
            store = self.make(num_pages=7, page_size=size, device=device)
            self.assertEqual(device.memory.live, 7 * store.page_bytes)
            self.assertEqual(store.page_bytes, 24 * (2 * size + 8) + 4 * size * 6)
            store.reserve_tails(3)
            self.assertEqual(device.memory.live, 7 * store.page_bytes + 3 * store.tail_bytes)
            self.assertEqual((store.tail_bytes, store.peak_tails), (4 * size * 24, 0))
            for page in (5, 1):
                store.write(page, 0, [1.0] * 24, [1.0] * 24)
            store.drop_tail(5)
            self.assertEqual((store.peak_tails, len(store.tails)), (2, 1))

    def test_a_pool_that_is_too_small_grows_and_keeps_what_it_has(self) -> None:
        store = self.make()
        tokens = {page: self.fill(store, page, 2, page) for page in (3, 0, 4, 1)}
        for page, written in tokens.items():
            self.assertEqual(self.keys(store, page, 2), [key for key, _ in written])
        store.drop_tail(0)
        held = store.pool.shape
        self.fill(store, 2, 3, 2)
        self.assertEqual((store.pool.shape, len({*store.tails.values()})), (held, 4))  # in the place of page 0's
        for page in (3, 4, 1):
            self.assertEqual(self.keys(store, page, 2), [key for key, _ in tokens[page]])

    def test_a_pool_that_does_not_fit_is_refused_and_nothing_has_changed(self) -> None:
        from starter.backends.cuda.device import Device
        device = Device("cpu", free_bytes=10_000)
        store = self.made(device, self.LAYERS, self.HEADS, self.WIDTH, 5, 3, scratch=6_000)
        key = self.fill(store, 2, 1, 0)[0][0]
        held = device.memory.live
        with self.assertRaisesRegex(BackendError, f"already held {held:,} .* tails 1,440 .* scratch 6,000 = "):
            store.reserve_tails(5)
        device.memory.limit = held + store.tail_bytes
        with self.assertRaisesRegex(BackendError, "out of memory"):
            store.write(3, 0, key, key)
        gc.collect()
        self.assertEqual((store.tails, store.read(2, 0)[0]), ({2: 0}, key))

    def test_a_tail_that_another_thread_drops_goes_to_nobody_else_in_the_step(self) -> None:
        """A request is cancelled just after the tail of its page was looked up."""
        class Dropping(dict[int, int]):
            def get(self, page: int, default: Any = None) -> Any:
                found = super().get(page, default)
                self.pop(page, None)
                return found

        store = self.make()
        store.reserve_tails(2)
        self.fill(store, 3, 1, 0)
        store.tails = Dropping(store.tails)
        found = store._tails_of([3, 1])
        self.assertEqual(len({*found.values()}), 2)
        self.assertEqual({*store.tails}, {1})

    def test_what_is_no_number_is_not_lost(self) -> None:
        """A channel of keys, or a token's values, that hold NaN come back as NaN; their neighbours as they were."""
        store = self.made(self.device, 1, 1, 2, 1, 2)
        store.write(0, 0, [1.0, 5.0], [2.0, 2.0])
        store.write(0, 1, [float("inf"), 5.0], [nan, 2.0])
        store.drop_tail(0)
        tokens = [[[number == number for number in row] for row in store.read(0, offset)] for offset in (0, 1)]
        self.assertEqual(tokens, [[[False, True], [True, True]], [[False, True], [False, False]]])


@needs("cuda", "warp")
class CudaInt8ForwardTest(unittest.TestCase):
    def test_logits_agree_with_the_plain_backend_and_numpy_in_a_mixed_batch(self) -> None:
        """A prefill from 0, a chunk in the middle and a decode in one batch, on permuted pages of 1 to 16: within 1e-4,
        and 2e-2 with weights of float16."""
        for seed in range(30):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                config, page_size = random_config(rng, plain=seed % 2 == 0), rng.choice((1, 2, 3, 4, 5, 8, 16))
                quantization = rng.choice((None, None, QuantizationConfig(8), QuantizationConfig(4, 5, False)))
                dtype, limit = rng.choice((("float32", 1e-4), ("float32", 1e-4), ("float16", 2e-2)))
                weights = seeded_weights(config, seed)
                early, late = split_prompts(rng, config, page_size)
                results = []
                for backend in (load_backend("reference"), load_backend("numpy"),
                                cuda(dtype=dtype, block=rng.choice((1, 32)))):
                    model = Model(config, weights, backend, quantization)
                    store = model.new_store(60, page_size, "int8")
                    self.assertEqual(model.forward(Batch.of(early, page_size), store), [])
                    for piece in early:
                        for page in piece.pages[:len(piece.tokens) // page_size]:
                            store.drop_tail(page)
                    results.append(model.forward(Batch.of(late, page_size), store))
                for others in zip(*results, strict=True):
                    for *wanted, got in zip(*others, strict=True):
                        self.assertLess(max(abs(got - number) for number in wanted), limit)

    def test_garbage_in_free_pages_and_tails_reaches_no_output(self) -> None:
        config = random_config(random.Random(1))
        model = Model(config, seeded_weights(config, 1), cuda(block=32))
        rows = []
        for number, code in ((0.0, 0), (nan, 127)):
            store: Any = model.new_store(4, 4, "int8")
            store.reserve_tails(3)
            for floats in (store.key_lows, store.key_scales, store.value_scales, store.pool):
                floats.fill_(number)
            for codes in (store.key_codes, store.value_codes):
                codes.fill_(code)
            pieces = [Piece([1, 2, 0, 1, 2, 0], 0, (3, 2), wants_logits=True), Piece([1], 0, (0,), wants_logits=True)]
            rows.append([list(row) for row in model.forward(Batch.of(pieces, 4), store)])
        self.assertEqual(*rows)

    def test_codes_are_what_is_computed_with(self) -> None:
        """Of a settled page: other codes of a key, or of a value, are other logits."""
        config = random_config(random.Random(3))
        model = Model(config, seeded_weights(config, 3), cuda())
        rows = []
        for name in (None, "key_codes", "value_codes"):
            store: Any = model.new_store(2, 4, "int8")
            model.forward(Batch.of([Piece([2, 1, 0, 1], 0, (0, 1), False)], 4), store)
            store.drop_tail(0)
            if name:
                numbers = getattr(store, name).numpy()
                numbers[1] ^= 0x40
                setattr(store, name, model.backend.device.put(numbers, getattr(store, name).dtype))
            rows.append(list(model.forward(Batch.of([Piece([2], 4, (0, 1), True)], 4), store)[0]))
        self.assertNotIn(rows[0], rows[1:])


@needs("cuda", "warp")
class CudaInt8EngineTest(EngineCase):
    """Tokens and log-probabilities, within 1e-4, of each request alone on the plain backend's int8 pages."""

    def engine(self, fault: Callable[[], None] | None = None, **settings: object) -> InferenceEngine:
        """``fault`` is called in every layer, when its keys and values are stored."""
        backend = cuda()
        if fault:
            swiglu = backend.swiglu
            backend.swiglu = lambda gate, up: (fault(), swiglu(gate, up))[1]
        return make_engine(backend, **settings, **INT8)

    def check_int8(self, engine: InferenceEngine, asks: dict[str, Ask], cancelled: str | None = None) -> None:
        """Run to the end; no tail is left, and there never was more than one for each page."""
        store: Any = engine.kv.store
        engine.run()
        for name, ask in asks.items():
            events = engine.poll(name)
            for number, wanted in enumerate(solo(ask, name, engine.settings.page_size)):
                got = outcome(events, number)
                if name == cancelled:
                    wanted = wanted[:len(got)]
                self.assertEqual([token for token, _ in got], [token for token, _ in wanted], f"{name}, {number}")
                for (_, mine), (_, theirs) in zip(got, wanted):
                    self.assertAlmostEqual(mine, theirs, delta=1e-4)
        self.check_empty(engine)
        self.assertFalse(store.tails or engine.kv.host_store.tails)  # type: ignore[attr-defined]
        self.assertLessEqual(store._pool_size, engine.kv.total_pages)

    def test_batch_preemption_sharing_and_swap_equal_solo(self) -> None:
        preempted = 0
        for serving, size in product(SERVINGS, (1, 2, 3)):
            with self.subTest(serving=serving, size=size):
                engine = self.engine(**{**TIGHT, "page_size": size, "num_pages": -(-18 // size), **serving})
                self.submit(engine, FIVE)
                self.check_int8(engine, FIVE)
                preempted += engine.metrics().preemptions
        self.assertGreater(preempted, 10)

    def test_random_requests_budgets_and_pools(self) -> None:
        """Samples that fork in the middle of a page, prompts that begin alike, all in pools that are too small."""
        copies = hits = 0
        for seed in range(8):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                begin = prompt_of(dice, 8)
                samplings = (SamplingParams(), SamplingParams(1.0), SamplingParams(1.3, seed=5, n=2))
                asks = {f"r{i}": Ask(begin[:dice.randint(1, 8)] + prompt_of(dice, dice.randint(0, 3)),
                                     dice.randint(1, 12), dice.choice(samplings)) for i in range(6)}
                size = dice.randint(1, 5)
                engine = self.engine(
                    page_size=size, num_pages=-(-22 // size) + dice.randint(0, 3), budget_tokens=dice.randint(2, 12),
                    preemption=dice.choice(("swap", "recompute")), host_pages=dice.choice((2, 30)),
                    max_running=dice.randint(2, 5), prefix_sharing=dice.random() < 0.5)
                for name, ask in asks.items():
                    self.submit(engine, {name: ask})
                    for _ in range(dice.randint(0, 2)):
                        engine.step()
                self.check_int8(engine, asks)
                copies += engine.kv.stats().copies
                hits += engine.metrics().found_tokens
        self.assertGreater(copies, 3)
        self.assertGreater(hits, 20)

    def test_a_failed_or_interrupted_step_is_computed_again_from_the_same_floats(self) -> None:
        for error, size in product((OSError("no luck"), KeyboardInterrupt()), (2, 3)):
            for call in range(0, 24, 5):
                with self.subTest(error=error, call=call, size=size):
                    calls = iter(range(10_000))

                    def fault(error: BaseException = error, call: int = call, calls: Any = calls) -> None:
                        if next(calls) == call:
                            raise error

                    engine = self.engine(fault, **{**TIGHT, "page_size": size})
                    self.submit(engine, FIVE)
                    if isinstance(error, KeyboardInterrupt):
                        with suppress(KeyboardInterrupt):
                            engine.run()
                    self.check_int8(engine, FIVE)

    def test_cancelled_while_the_decoder_computes(self) -> None:
        """Its tail goes at once; the others do not notice, and nothing fails."""
        for moment in range(0, 12, 3):
            with self.subTest(moment=moment):
                moments = iter(range(10_000))

                def cancel(moment: int = moment, moments: Any = moments) -> None:
                    if next(moments) == moment:
                        engine.cancel("a")  # noqa: B023

                engine = self.engine(cancel, **TIGHT)
                self.submit(engine, FIVE)
                self.check_int8(engine, FIVE, cancelled="a")

    def test_a_budget_in_bytes_pays_for_pages_and_tails(self) -> None:
        """Pages and the reserved pool stay within it; the plan covers the peak."""
        for budget, size in product((3_000, 10_000, 40_000), (2, 4)):
            with self.subTest(budget=budget, size=size):
                backend = cuda()
                engine = make_engine(backend, page_size=size, max_running=3, budget_tokens=8, kv_budget_bytes=budget,
                                     **INT8)
                store: Any = engine.kv.store
                tails = min(engine.kv.total_pages, {2: 7, 4: 6}[size])
                self.assertEqual(store._pool_size, tails)
                held = engine.kv.total_pages * store.page_bytes + tails * store.tail_bytes
                self.assertLessEqual(held, budget)
                self.assertGreater(held + store.page_bytes + store.tail_bytes, budget)
                asks = {"a": FIVE["a"], "d": FIVE["d"]}
                self.submit(engine, asks)
                self.check_int8(engine, asks)
                self.assertEqual(store._pool_size, tails)
                self.assertLessEqual(backend.memory.peak, backend.memory.planned)

    def test_samples_that_run_beyond_max_running_find_tails(self) -> None:
        """One request is admitted and three of its samples with it: the pool, reserved for less, grows under them."""
        asks = {"a": Ask((3, 1, 4, 1), 9, SamplingParams(1.3, seed=5, n=4))}
        engine = self.engine(page_size=4, num_pages=20, max_running=1, budget_tokens=4)
        store: Any = engine.kv.store
        reserved = store._pool_size
        self.submit(engine, asks)
        self.check_int8(engine, asks)
        self.assertGreater(store.peak_tails, reserved)

    def test_pages_that_do_not_fit_are_refused_before_they_are_taken(self) -> None:
        backend = cuda(free_bytes=200_000, rows=16)
        with self.assertRaisesRegex(BackendError, "K/V pages 1,152,000 .* but cpu may use 180,000"):
            make_engine(backend, page_size=16, num_pages=2_000, **INT8)
        self.assertLess(backend.memory.peak, 20_000)

    def test_tails_that_do_not_fit_are_refused_before_they_are_taken(self) -> None:
        settings = EngineSettings(page_size=16, num_pages=40, max_running=10, budget_tokens=64)
        backend = cuda()
        with self.assertRaisesRegex(BackendError, "already held .* tails .* scratch .* but cpu may use"):
            store = 40 * (2 * 16 * 8 + 8 * 8 + 4 * 16 * 4)  # bytes of the pages alone: 2 layers, 2 heads of 2
            real, self.limited = backend.memory.plan, False

            def plan(parts: dict[str, int]) -> None:
                if "tails" in parts:
                    self.assertEqual(parts["tails"], most_tails(settings) * 4 * 16 * 8)
                    backend.memory.limit = backend.memory.free = backend.memory.live + store
                    self.limited = True
                real(parts)

            with mock.patch.object(backend.memory, "plan", plan):
                make_engine(backend, page_size=16, num_pages=40, max_running=10, budget_tokens=64, **INT8)
        self.assertTrue(self.limited)

    def test_served_from_int8_pages(self) -> None:
        """The fixture: token for token as on NumPy's int8 pages, also where weights are packed, and mostly so in
        float16; in fewer bytes than pages of floats."""
        scenario = load_scenario(FIXTURE)

        def served(backend: Any, **settings: Any) -> tuple[dict[str, list[int]], Any]:
            with InferenceEngine.from_scenario(scenario, backend, num_pages=40, **settings) as engine:
                tokens = tokens_of([event for played in play(engine, scenario) for event in played.events])
                return tokens, engine.kv

        for quantization in (None, "int4"):
            wanted, _ = served("numpy", quantization=quantization, **INT8)
            backend = cuda()
            got, kv = served(backend, quantization=quantization, **INT8)
            self.assertEqual(got, wanted)
            self.assertLessEqual(backend.memory.peak, backend.memory.planned)
        _, floats = served(cuda())
        self.assertLess(3 * kv.store.page_bytes, 2 * floats.store.page_bytes)
        half, _ = served(cuda(dtype="float16"), **INT8)
        wanted, _ = served("numpy", **INT8)
        self.assertGreaterEqual(sum(half[name] == tokens for name, tokens in wanted.items()), len(wanted) // 2)

    def test_from_the_command_line(self) -> None:
        run = run_main(driver.main, "--fixture", FIXTURE, "--backend", "cuda", "--device", "cpu", "--clock", "virtual",
                       "--kv-quantization", "int8", "--json")
        self.assertEqual((run.code, run.err), (0, ""))
        document = json.loads(run.out)
        self.assertEqual((document["backend"], document["metrics"]["finished"]["error"]), ("cuda", 0))


if __name__ == "__main__":
    unittest.main()
