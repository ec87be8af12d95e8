"""KV pages in int8: the stated error, the rule who sees floats and who sees codes, and the promises of float pages."""

from __future__ import annotations

import io
import json
import random
import struct
import unittest
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from fractions import Fraction
from functools import cache
from itertools import chain, pairwise, product
from math import inf, isnan, nan

from starter.backend import Batch, Piece, ReferenceBackend, Span
from starter.backends.int8_pages import Int8KVStore, cut_by_page, encode_keys, encode_value
from starter.base.weights import seeded_weights
from starter.driver import main
from starter.engine import InferenceEngine
from starter.errors import CapacityError, SchemaError
from starter.kv_cache import KVCacheManager, KVHandle, KVStore
from starter.model import Model
from starter.reference import reference_logits
from starter.schema import load_scenario
from tests.models import random_config
from tests.paths import FIXTURE
from tests.support import (
    CONFIG,
    CONTEXT,
    FIVE,
    SERVINGS,
    TIGHT,
    WEIGHTS,
    Ask,
    EngineCase,
    FaultyBackend,
    Outcome,
    SamplingParams,
    failing_at,
    make_engine,
    outcome,
    prompt_of,
)
from tests.test_backend import check_operations

INT8: dict[str, object] = {"kv_quantization": "int8"}
Encode = Callable[[Sequence[float]], tuple[Sequence[int], float, float]]


def single(number: float) -> float:
    """Rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def keys(numbers: Sequence[float]) -> tuple[Sequence[int], float, float]:
    return encode_keys(numbers)


def values(numbers: Sequence[float]) -> tuple[Sequence[int], float, float]:
    codes, scale = encode_value(numbers)
    return codes, 0.0, scale


SHAPES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda dice: dice.gauss(0, 1), "far away": lambda dice: 1000 + dice.random(),
    "positive": lambda dice: dice.random(), "zero": lambda dice: 0.0, "constant": lambda dice: -7.25,
    "an outlier": lambda dice: dice.choice((1e-3, 2e-3, 1e30)), "subnormal": lambda dice: dice.randrange(9) * 2.0**-149,
    "of a subnormal scale": lambda dice: dice.randrange(400) * 2.0**-149,
    "tiny": lambda dice: dice.random() * 1e-37, "the whole range": lambda dice: dice.uniform(-3.4e38, 3.4e38),
}


class FormatTest(unittest.TestCase):
    def check(self, encode: Encode, numbers: Sequence[float], lowest: int, highest: int) -> None:
        """In exact arithmetic: within half a scale as stored, which is no coarser than the numbers' range asks."""
        codes, low, scale = encode(numbers)
        self.assertEqual((single(low), single(scale)), (low, scale))
        span = max(numbers) - min(numbers) if lowest == 0 else max(map(abs, numbers))
        self.assertLessEqual(scale, max(span / highest * (1 + 2**-23), 2.0**-126))
        for number, code in zip(numbers, codes, strict=True):
            self.assertTrue(lowest <= code <= highest)
            off = abs(Fraction(number) - Fraction(low) - Fraction(scale) * code)
            self.assertLessEqual(off, Fraction(scale) / 2 * (1 + Fraction(1, 2**40)), (number, code, low, scale))

    def test_every_number_comes_back_within_half_a_scale(self) -> None:
        for (name, draw), size, seed in product(SHAPES.items(), (1, 2, 16, 33), range(5)):
            with self.subTest(shape=name, size=size, seed=seed):
                dice = random.Random(seed)
                numbers = [single(draw(dice)) for _ in range(size)]
                self.check(keys, numbers, 0, 255)
                self.check(values, numbers, -127, 127)

    def test_a_constant_channel_comes_back_exactly(self) -> None:
        for number in (0.0, -7.25, 1e30, 2.0**-149):
            codes, low, _ = encode_keys([number] * 5)
            self.assertEqual((codes, low), (bytes(5), number))

    def test_zero_values_stay_zero_beside_anything(self) -> None:
        for other in (1e-30, 1.0, -1e38):
            self.assertEqual(encode_value([0.0, other])[0][0], 0)

    def test_what_is_no_number_is_not_lost(self) -> None:
        for wrong, place in product((nan, inf, -inf), range(3)):
            numbers = [wrong if i == place else 1.0 for i in range(3)]
            for encode in (keys, values):
                codes, low, scale = encode(numbers)
                self.assertTrue(all(isnan(low + scale * code) for code in codes))


class CutTest(unittest.TestCase):
    def test_parts_cover_the_span_and_none_crosses_a_page(self) -> None:
        for start, count, size in product(range(9), range(1, 9), range(1, 6)):
            end = start + count
            span = Span(5, count, end, tuple(range(20, 0, -1)), size)
            parts = list(cut_by_page(span, size))
            self.assertEqual([row for part in parts for row in range(part.first_row, part.first_row + part.count)],
                             list(range(5, 5 + count)))
            positions = [list(range(part.start, part.end)) for part in parts]
            self.assertEqual([*chain(*positions)], list(range(start, end)))
            for part, inside in zip(parts, positions):
                self.assertEqual(len({position // size for position in inside}), 1)
                self.assertEqual(part.context, span.context[:part.end])


Token = tuple[list[float], list[float]]


class StoreTest(unittest.TestCase):
    def test_it_has_every_operation_of_a_store(self) -> None:
        check_operations(self, Int8KVStore, KVStore)

    LAYERS, HEADS, WIDTH = 2, 3, 4

    def make(self, num_pages: int = 5, page_size: int = 3) -> Int8KVStore:
        return Int8KVStore(self.LAYERS, self.HEADS, self.WIDTH, num_pages, page_size)

    def token(self, dice: random.Random, store: Int8KVStore) -> Token:
        key, value = ([single(dice.gauss(0, 1)) for _ in range(store.width)] for _ in range(2))
        return key, value

    def fill(self, store: Int8KVStore, page: int, count: int, seed: int = 0) -> list[Token]:
        dice = random.Random(seed)
        tokens = [self.token(dice, store) for _ in range(count)]
        for offset, (key, value) in enumerate(tokens):
            store.write(page, offset, key, value)
        return tokens

    def check(self, store: Int8KVStore, page: int, tokens: Sequence[Token], whole: bool) -> None:
        """Keys as they came, or, of a whole page, by the formula for each channel; values by that for each token."""
        for offset, (key, value) in enumerate(tokens):
            got_key, got_value = store.read(page, offset)
            if not whole:
                self.assertEqual(got_key, key)
            for c in range(store.width if whole else 0):
                channel = [token[0][c] for token in tokens]
                scale = single((max(channel) - min(channel)) / 255) or 1.0
                self.assertEqual(got_key[c], min(channel) + scale * round((key[c] - min(channel)) / scale))
            for c in range(store.width):
                head = value[c // self.WIDTH * self.WIDTH:][:self.WIDTH]
                scale = single(max(map(abs, head)) / 127)
                self.assertEqual(got_value[c], scale * round(value[c] / scale))

    def test_a_page_is_floats_until_it_is_settled_and_full(self) -> None:
        for size in (1, 2, 3, 8):
            for count in range(1, size + 1):
                with self.subTest(size=size, count=count):
                    store = self.make(page_size=size)
                    tokens = self.fill(store, 2, count)
                    self.check(store, 2, tokens, whole=False)
                    self.assertEqual(list(store.tails), [2])
                    if count == size:
                        store.drop_tail(2)
                        self.check(store, 2, tokens, whole=True)
                        self.assertFalse(store.tails)

    def test_an_earlier_owner_leaves_nothing(self) -> None:
        store = self.make()
        self.fill(store, 0, 3, seed=1)
        for settled in (False, True):
            if settled:
                store.drop_tail(0)
            tokens = self.fill(store, 0, 3, seed=2)
            self.check(store, 0, tokens, whole=False)
            store.drop_tail(0)
            self.check(store, 0, tokens, whole=True)

    def test_a_copy_has_codes_and_tail_and_is_its_own(self) -> None:
        for other_store, count in product((False, True), (1, 2, 3)):
            with self.subTest(other_store=other_store, count=count):
                source, target = self.make(), self.make(num_pages=2)
                if not other_store:
                    target = source
                tokens = self.fill(source, 4, count)
                if count == 3:
                    source.drop_tail(4)
                self.fill(target, 1, 2, seed=9)  # an earlier owner, whose tail must go
                target.copy_page(4, 1, source if other_store else None)
                self.check(target, 1, tokens, whole=count == 3)
                self.fill(source, 4, 3, seed=5)
                self.check(target, 1, tokens, whole=count == 3)
                if count < 3:
                    rest = [self.token(random.Random(7), source) for _ in range(3 - count)]
                    for offset, (key, value) in enumerate(rest, count):
                        target.write(1, offset, key, value)
                    target.drop_tail(1)
                    self.check(target, 1, tokens + rest, whole=True)

    def test_bytes_are_what_is_held(self) -> None:
        for size in (1, 4, 16):
            store = self.make(num_pages=7, page_size=size)
            arrays = (store.key_lows, store.key_scales, store.value_codes, store.value_scales)
            held = len(store.key_codes) + sum(len(a) * a.itemsize for a in arrays)
            self.assertEqual(held, 7 * store.page_bytes)
            self.assertEqual(store.page_bytes, 24 * (2 * size + 8) + 4 * size * 6)
            self.fill(store, 3, 1)
            self.assertEqual(len(store.tails[3]) * store.tails[3].itemsize, store.tail_bytes)
        large = Int8KVStore(5, 4, 8, 1, 16)  # the shape of stories260K, a head of 8 being the costliest there is
        self.assertLess(large.page_bytes / (2 * 4 * 16 * large.width), 0.38)
        self.assertLess(Int8KVStore(5, 4, 64, 1, 16).page_bytes / (2 * 4 * 16 * 5 * 4 * 64), 0.33)


class ForwardTest(unittest.TestCase):
    def pieces(self, dice: random.Random, tokens: Sequence[int], pages: Sequence[int]) -> list[Piece]:
        cuts = sorted(dice.sample(range(1, len(tokens)), dice.randint(0, len(tokens) - 1)))
        return [Piece(tokens[start:end], start, pages, True) for start, end in pairwise([0, *cuts, len(tokens)])]

    def test_bitwise_the_same_however_the_work_is_cut_and_where_it_lies(self) -> None:
        """Chunks of any size, other pages, other company, settled between steps or not, dirty pages."""
        for seed in range(12):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                config, size = random_config(dice), dice.choice((1, 2, 3, 4, 7))
                model = Model(config, seeded_weights(config, seed), ReferenceBackend())
                tokens = [dice.choices(range(config.vocab_size), k=14) for _ in range(2)]
                wanted = [self.solo(model, each, size) for each in tokens]
                for settled in (False, True):
                    store = model.new_store(40, size, "int8")
                    for slot in range(40 * size):
                        store.write(*divmod(slot, size), [nan] * store.width, [nan] * store.width)
                    pages = dice.sample(range(40), 40)
                    tables = pages[:20], pages[20:]
                    queues = [self.pieces(dice, each, table) for each, table in zip(tokens, tables)]
                    got: list[dict[int, list[float]]] = [{}, {}]
                    while any(queues):
                        who = [i for i in (0, 1) if queues[i] and (dice.random() < 0.7 or not queues[1 - i])]
                        batch = [queues[i].pop(0) for i in who]
                        for i, piece, row in zip(who, batch, model.forward(Batch.of(batch, size), store)):
                            got[i][piece.start + len(piece.tokens)] = row
                            full = (piece.start + len(piece.tokens)) // size
                            for page in piece.pages[:full] if settled else ():
                                store.drop_tail(page)
                    for rows, expected in zip(got, wanted):
                        self.assertEqual(rows, {end: expected[end] for end in rows})

    def solo(self, model: Model, tokens: Sequence[int], size: int) -> dict[int, list[float]]:
        """One token at a time, alone: the logits after each."""
        store = model.new_store(14, size, "int8")
        return {end: model.forward(Batch.of([Piece(tokens[end - 1:end], end - 1, range(14), True)], size), store)[0]
                for end in range(1, len(tokens) + 1)}

    def test_a_query_sees_its_own_page_as_floats(self) -> None:
        """Nothing is quantized but values while there is one page; and the error is small, not none, afterwards."""
        for seed in range(6):
            with self.subTest(seed=seed):
                config = random_config(random.Random(seed))
                model = Model(config, seeded_weights(config, seed), ReferenceBackend())
                tokens = random.Random(seed).choices(range(config.vocab_size), k=12)
                exact = reference_logits(config, model.parameters(), tokens)
                off = [max(abs(a - b) for a, b in zip(self.solo(model, tokens, size)[12], exact)) for size in (3, 16)]
                self.assertTrue(all(0 < error < 0.1 for error in off), off)
                store = model.new_store(1, 16, "int8")
                model.forward(Batch.of([Piece(tokens, 0, (0,), True)], 16), store)
                self.assertEqual(bytes(store.key_codes), bytes(len(store.key_codes)))  # type: ignore[attr-defined]

    def test_codes_are_what_is_computed_with(self) -> None:
        """One byte changed in a settled page, of a key or of a value, changes the next logits; and no float is left."""
        model = Model(CONFIG, WEIGHTS, ReferenceBackend())
        rows = []
        for name in (None, "key_codes", "value_codes"):
            store = model.new_store(2, 4, "int8")
            model.forward(Batch.of([Piece([3, 1, 4, 1], 0, (0, 1), False)], 4), store)
            store.drop_tail(0)
            self.assertFalse(store.tails)  # type: ignore[attr-defined]
            if name:
                getattr(store, name)[1] ^= 0x40
            rows.append(model.forward(Batch.of([Piece([5], 4, (0, 1), True)], 4), store))
        self.assertNotIn(rows[0], rows[1:])

    def test_keys_with_an_outlier_channel_cost_little(self) -> None:
        """Why keys have a grid for each channel: one channel at 1000, the rest around 1."""
        dice, store = random.Random(5), Int8KVStore(1, 1, 8, 1, 16)
        tokens = [[1000.0 + dice.random(), *(dice.gauss(0, 1) for _ in range(7))] for _ in range(16)]
        for offset, key in enumerate(tokens):
            store.write(0, offset, key, key)
        store.drop_tail(0)
        for offset, key in enumerate(tokens):
            self.assertLess(max(abs(a - b) for a, b in zip(store.read(0, offset)[0], key)), 0.02)


class ManagerTest(unittest.TestCase):
    def make(self, pages: int = 8, size: int = 3) -> KVCacheManager:
        store, host = (Int8KVStore(1, 1, 2, pages, size) for _ in range(2))
        return KVCacheManager(pages, size, 2, store=store, host_pages=pages, host_store=host)

    def tails(self, kv: KVCacheManager) -> tuple[set[int], set[int]]:
        return set(kv.store.tails), set(kv.host_store.tails)  # type: ignore[attr-defined]

    def test_random_operations(self) -> None:
        """Tails are those of pages that hold tokens and are not full, here and on the host; reads depend on what was
        appended and on the page size alone."""
        for seed in range(20):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                size = dice.randint(1, 4)
                kv = self.make(9, size)
                lives: dict[KVHandle, list[Token]] = {}
                for number in range(80):
                    self.operate(dice, kv, lives, f"r{number}")
                    wanted: tuple[set[int], set[int]] = set(), set()
                    for handle, tokens in lives.items():
                        self.assertEqual([kv.read(handle, i) for i in range(len(tokens))], alone(tokens, size))
                        table = kv._table(handle)
                        if len(tokens) % size:
                            pages = table.pages if table.host_pages is None else table.host_pages
                            wanted[table.host_pages is not None].add(pages[len(tokens) // size])
                    self.assertEqual(self.tails(kv), wanted)
                for handle in lives:
                    kv.release(handle)
                self.assertEqual(self.tails(kv), (set(), set()))

    def operate(self, dice: random.Random, kv: KVCacheManager, lives: dict[KVHandle, list[Token]], name: str) -> None:
        operation = dice.choice(("append",) * 6 + ("open", "fork", "release", "swap out", "swap in"))
        if operation == "open" or not lives:
            lives[kv.allocate(name, 0)] = []
            return
        handle = dice.choice(list(lives))
        table = kv._table(handle)
        if operation == "release":
            kv.release(handle)
            del lives[handle]
        elif table.host_pages is not None:
            if operation == "swap in" and kv.free_pages >= kv.pages_for(table.length):
                kv.swap_in(handle, table.length)
        elif operation == "fork":
            lives[kv.fork(handle, name)] = list(lives[handle])
        elif operation == "swap out" and kv.free_host_pages >= kv.pages_for(table.length):
            kv.swap_out(handle)
        elif operation == "append" and kv.free_pages:
            key, value = ([single(dice.gauss(0, 1)) for _ in range(2)] for _ in range(2))
            kv.append(handle, key, value)
            lives[handle].append((key, value))

    def test_a_copy_that_fails_leaves_no_tail(self) -> None:
        kv = self.make()
        first = kv.allocate("first", 0)
        kv.append(first, [1, 2], [3, 4])
        before = self.tails(kv)
        copy = kv.store.copy_page

        def fail(source: int, target: int, origin: object = None) -> None:
            copy(source, target)
            raise MemoryError("no")

        kv.store.copy_page = fail  # type: ignore[method-assign]
        self.assertRaises(MemoryError, kv.append, kv.fork(first, "second"), [1, 2], [3, 4])
        self.assertEqual(self.tails(kv), before)

    def test_stats_count_tails_at_their_peak(self) -> None:
        kv = self.make()
        handles = [kv.allocate(f"r{i}", 0) for i in range(3)]
        for handle in handles:
            for _ in range(4):
                kv.append(handle, [1, 2], [3, 4])
        self.assertEqual(kv.stats().peak_tail_bytes, 3 * 4 * 3 * 2)
        self.assertEqual(kv.stats().peak_bytes, 6 * (2 * 3 * 2 + 8 * 2 + 4 * 3))


def alone(tokens: Sequence[Token], size: int) -> list[Token]:
    """What a store holds of these tokens when nothing else ever happened."""
    store = Int8KVStore(1, 1, 2, 30, size)
    for position, (key, value) in enumerate(tokens):
        store.write(*divmod(position, size), key, value)
    for page in range(len(tokens) // size):
        store.drop_tail(page)
    return [store.read(*divmod(position, size)) for position in range(len(tokens))]


@cache
def solo(ask: Ask, request_id: str, page_size: int) -> tuple[Outcome, ...]:
    """What each sample of a request yields alone on int8 pages of this size, the prompt in one piece."""
    engine = make_engine(page_size=page_size, num_pages=ask.sampling.n * -(-CONTEXT // page_size),
                         budget_tokens=CONTEXT, **INT8)
    ask.submit(engine, request_id)
    events = list(engine.stream(request_id))
    return tuple(outcome(events, number) for number in range(ask.sampling.n))


class EngineTest(EngineCase):
    def check_int8(self, engine: InferenceEngine, asks: dict[str, Ask]) -> None:
        """Run to the end: every sample bit by bit as alone, on the pages' own size; and no tail is left."""
        engine.run()
        for name, ask in asks.items():
            events = engine.poll(name)
            for number, wanted in enumerate(solo(ask, name, engine.settings.page_size)):
                self.assertEqual(outcome(events, number), wanted, f"{name}, sample {number}")
        self.check_empty(engine)
        self.assertFalse(engine.kv.store.tails or engine.kv.host_store.tails)  # type: ignore[attr-defined]

    def test_batch_preemption_sharing_and_swap_equal_solo(self) -> None:
        preempted = 0
        for serving, size in product(SERVINGS, (1, 2, 3)):
            with self.subTest(serving=serving, size=size):
                engine = make_engine(**{**TIGHT, "page_size": size, "num_pages": -(-18 // size), **serving, **INT8})
                self.submit(engine, FIVE)
                self.check_int8(engine, FIVE)
                preempted += engine.metrics().preemptions
        self.assertGreater(preempted, 10)

    def test_random_requests_budgets_and_pools(self) -> None:
        """Samples that fork in the middle of a page, prompts that begin alike, all in pools that are too small."""
        copies = hits = 0
        for seed in range(12):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                begin = prompt_of(dice, 8)
                samplings = (SamplingParams(), SamplingParams(1.0), SamplingParams(1.3, seed=5, n=2))
                asks = {f"r{i}": Ask(begin[:dice.randint(1, 8)] + prompt_of(dice, dice.randint(0, 3)),
                                     dice.randint(1, 12), dice.choice(samplings)) for i in range(6)}
                size = dice.randint(1, 5)
                engine = make_engine(
                    page_size=size, num_pages=-(-22 // size) + dice.randint(0, 3), budget_tokens=dice.randint(2, 12),
                    preemption=dice.choice(("swap", "recompute")), host_pages=dice.choice((2, 30)),
                    max_running=dice.randint(2, 5), prefix_sharing=dice.random() < 0.5, **INT8)
                for name, ask in asks.items():
                    self.submit(engine, {name: ask})
                    for _ in range(dice.randint(0, 2)):
                        engine.step()
                self.check_int8(engine, asks)
                copies += engine.kv.stats().copies
                hits += engine.metrics().found_tokens
        self.assertGreater(copies, 3)
        self.assertGreater(hits, 20)

    def test_a_failed_or_interrupted_step_changes_no_number(self) -> None:
        """Whether a layer fails and each request is computed alone, or the step is interrupted and planned again: the
        page that it filled is computed from the same floats."""
        for error, size in product((OSError("no luck"), KeyboardInterrupt()), (2, 3)):
            for call in range(0, 24, 3):
                with self.subTest(error=error, call=call, size=size):
                    engine = make_engine(failing_at(call, "middle", error), **{**TIGHT, "page_size": size}, **INT8)
                    self.submit(engine, FIVE)
                    if isinstance(error, KeyboardInterrupt):
                        with suppress(KeyboardInterrupt):
                            engine.run()
                    self.check_int8(engine, FIVE)

    def test_interrupted_after_the_computation(self) -> None:
        """All numbers are there, but no token was chosen yet: nothing is settled."""
        for size, call in product((2, 3), range(6)):
            with self.subTest(size=size, call=call):
                engine = make_engine(**{**TIGHT, "page_size": size}, **INT8)
                choose, calls = engine._core.choose, iter(range(100))

                def interrupted(*arguments: object, choose=choose, calls=calls, call=call) -> object:
                    if next(calls) == call:
                        raise KeyboardInterrupt
                    return choose(*arguments)

                engine._core.choose = interrupted  # type: ignore[method-assign, assignment]
                self.submit(engine, FIVE)
                self.assertRaises(KeyboardInterrupt, engine.run)
                self.check_int8(engine, FIVE)

    def test_cancelled_while_the_decoder_computes(self) -> None:
        """Its tail goes at once; the others do not notice, and nothing fails."""
        moments = iter(range(100))

        def cancel(moment: str, tokens: Sequence[int]) -> None:
            if moment == "middle" and next(moments) == 2:
                engine.cancel("a")

        engine = make_engine(FaultyBackend(cancel), **TIGHT, **INT8)
        self.submit(engine, FIVE)
        engine.run()
        for name, ask in FIVE.items():
            events = engine.poll(name)
            if name == "a":
                self.assertEqual(events[-1].finish_reason, "cancelled")
            else:
                self.assertEqual((outcome(events),), solo(ask, name, TIGHT["page_size"]))

    def test_tokens_are_nearly_those_of_float_pages(self) -> None:
        """Few of these greedy tokens differ; log-probabilities all do, by little."""
        engines = [make_engine(page_size=4, **settings) for settings in ({}, INT8)]
        for engine in engines:
            self.submit(engine, FIVE)
            engine.run()
        for name in FIVE:
            plain, coded = (outcome(engine.poll(name)) for engine in engines)
            self.assertNotEqual(plain, coded)
            for (token, logprob), (other, near) in zip(plain, coded):
                if token != other:
                    break
                self.assertLess(abs(logprob - near), 0.05)

    def test_a_cancel_in_mid_computation_leaves_no_tail(self) -> None:
        """The pages are given back while the decoder still writes to them: what it leaves there goes, too."""
        def cancel(moment: str, tokens: Sequence[int]) -> None:
            if moment == "middle" and engine.active:  # once: then there is none
                engine.cancel("a")

        engine = make_engine(FaultyBackend(cancel), page_size=4, num_pages=8, **INT8)
        engine.submit([3, 1, 4, 1, 5, 9, 2, 6, 5], 5, request_id="a")
        engine.step()
        self.assertEqual((engine.kv.free_pages, engine.kv.store.tails), (8, {}))  # type: ignore[attr-defined]

    def test_a_budget_in_bytes_pays_for_tails(self) -> None:
        """One for each running request and one for each page that a step can begin besides: six."""
        page, tail = 8 * (2 * 4 + 8) + 4 * 4 * 4, 4 * 4 * 8  # keys and values of 4 tokens: 2 layers, 2 heads of 2
        for budget, pages in ((page + tail, 1), (2 * (page + tail) - 1, 1), (6 * (page + tail), 6),
                              (6 * (page + tail) + 4 * page, 10), (6 * (page + tail) + 4 * page - 1, 9)):
            with self.subTest(budget=budget):
                engine = make_engine(page_size=4, max_running=3, budget_tokens=8, kv_budget_bytes=budget, **INT8)
                self.assertEqual(engine.kv.total_pages, pages)
        with self.assertRaisesRegex(CapacityError, f"less than one page of 4 tokens .{page + tail} bytes"):
            make_engine(page_size=4, kv_budget_bytes=page + tail - 1, **INT8)

    def test_without_a_cache_there_is_nothing_to_quantize(self) -> None:
        self.assertRaisesRegex(SchemaError, "kv_quantization.*no KV pages", make_engine, use_cache=False, **INT8)

    def test_the_driver_serves_on_int8_pages(self) -> None:
        """It says so, in fewer bytes; golden tokens of float pages are no verdict on it."""
        written = io.StringIO()
        with redirect_stdout(written):
            code = main(["--fixture", str(FIXTURE), "--backend", "cpu", "--clock", "virtual", "--json",
                         "--kv-quantization", "int8"])
        self.assertEqual(code, 0)
        metrics = json.loads(written.getvalue())["metrics"]
        self.assertEqual((sum(metrics["finished"].values()), metrics["finished"]["error"]), (10, 0))
        model, size = load_scenario(FIXTURE).model, load_scenario(FIXTURE).engine.page_size
        numbers = model.layers * model.kv_heads * (2 * size * model.head_width + 8 * model.head_width + 4 * size)
        self.assertEqual(metrics["kv_peak_bytes"], metrics["kv_peak_pages"] * numbers)
        written = io.StringIO()
        with redirect_stdout(written):
            main(["--fixture", str(FIXTURE), "--kv-quantization", "int8", "--manifest-only"])
        self.assertIn("int8 pages of", written.getvalue())


if __name__ == "__main__":
    unittest.main()
