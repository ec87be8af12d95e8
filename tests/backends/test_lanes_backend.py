"""The default backend: its operations against their formulas, its tokens against the plain loops, its streams against
themselves in any company."""

from __future__ import annotations

import random
import unittest
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from inspect import signature
from math import exp, fsum, inf, isnan, log, nan, sqrt
from unittest import mock

from scripts import fuzz
from starter import InferenceEngine, load_backend, load_scenario
from starter.backend import Backend, Batch, Piece, ReferenceBackend
from starter.backends.int8_pages import Int8KVStore
from starter.backends.lanes.backend import LanesBackend
from starter.backends.lanes.pages import MOST_POSITIONS, LanesKVStore
from starter.base.rope import rotary_frequencies
from starter.base.weights import Tensor, seeded_weights
from starter.checkpoints.llama2c import read_llama2c
from starter.command.play import play, tokens_of
from starter.errors import BackendError
from starter.model import Model
from starter.schema import QuantizationConfig
from tests.models import random_config
from tests.paths import FIXTURE, ROOT
from tests.support import CONFIG, CONTEXT, FIVE, SERVINGS, TIGHT, WEIGHTS, EngineCase, make_engine, outcome
from tests.test_backend import parameters as parameters_of

STORIES = ROOT.parent / "shared" / "models" / "stories260K"
LANES, PLAIN = LanesBackend(), ReferenceBackend()
ROWS = QuantizationConfig(8, None), QuantizationConfig(4, None)  # one scale a row: codes go into lanes as they are
GROUPS = QuantizationConfig(8, 4), QuantizationConfig(4, 4, symmetric=False)


def tensor(dice: random.Random, rows: int, columns: int) -> Tensor:
    return Tensor((rows, columns), array("f", [dice.gauss(0, 1) for _ in range(rows * columns)]))


def draw_rows(dice: random.Random, rows: int, columns: int) -> list[list[float]]:
    return [[dice.uniform(-2.0, 2.0) for _ in range(columns)] for _ in range(rows)]


def distance(mine: Iterable[Sequence[float]], theirs: Iterable[Sequence[float]]) -> float:
    return max(abs(a - b) for row, other in zip(mine, theirs, strict=True) for a, b in zip(row, other, strict=True))


def in_chunks(model: Model, tokens: Sequence[int], cuts: Sequence[int], page_size: int = 3,
              kv_quantization: str | None = None) -> list[list[float]]:
    """Logits after each chunk, on pages in reverse order."""
    pages, rows = range(-(-len(tokens) // page_size))[::-1], []
    store = model.new_store(len(pages), page_size, kv_quantization)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)]):
        rows += model.forward(Batch.of([Piece(tokens[start:end], start, pages, True)], page_size), store)
    return rows


class LoadTest(unittest.TestCase):
    def test_it_is_the_backend_cpu(self) -> None:
        self.assertIs(type(load_backend("cpu")), LanesBackend)
        self.assertIs(type(load_backend("reference")), ReferenceBackend)
        self.assertEqual((load_backend("cpu").name, load_backend("reference").name), ("cpu", "reference"))
        for name, parameters in parameters_of(Backend).items():
            self.assertEqual(list(signature(getattr(LanesBackend, name)).parameters), parameters, name)

    def test_a_machine_that_reads_numbers_the_other_way_round(self) -> None:
        with mock.patch("sys.byteorder", "big"), self.assertRaisesRegex(BackendError, "use backend='reference'"):
            LanesBackend()

    def test_contexts_that_are_too_long(self) -> None:
        """What counts is the longest context that both the model and the pages have room for."""
        long = replace(CONFIG, max_context=20_000)
        for model, pages in ((long, 1024), (replace(CONFIG, max_context=MOST_POSITIONS), 2000)):
            self.assertIsInstance(LANES.kv_store(model, pages, 8), LanesKVStore)
        with self.assertRaisesRegex(BackendError, r"at most 8,192 positions, not 8,200; take fewer pages, or backend="):
            LANES.kv_store(long, 1025, 8)
        self.assertIsInstance(LANES.kv_store(long, 1025, 8, (), "int8"), Int8KVStore)

    def test_the_plan(self) -> None:
        backend, dice = LanesBackend(), random.Random(1)
        self.assertEqual(len(backend.plan().splitlines()), 1)
        for config in (None, None, *ROWS, *GROUPS):
            backend.matrix(tensor(dice, 2_000, 20), config)
        self.assertEqual(backend.plan().splitlines()[1:], [
            "       4     2,000       20  14-bit, float  32 bits     0.6",
            "       1     2,000       20  int8           24 bits     0.1",
            "       1     2,000       20  int4           16 bits     0.1"])
        self.assertEqual({len(line) for line in backend.plan().splitlines()}, {len(backend.plan().splitlines()[0])})

    def test_bytes(self) -> None:
        """What is stored is counted apart from what was made of it: of float weights the lanes are all there is."""
        weights = tensor(random.Random(2), 300, 11)
        floats = LANES.matrix(weights, None)
        self.assertEqual((LANES.matrix_bytes(floats), LANES.working_bytes(floats)), (11 * 300 * 32 // 30 * 4, 0))
        for config, bits in zip((*ROWS, *GROUPS), (24, 16, 32, 32)):
            matrix = LANES.matrix(weights, config)
            self.assertEqual(LANES.matrix_bytes(matrix), PLAIN.matrix_bytes(PLAIN.matrix(weights, config)))
            self.assertEqual(LANES.working_bytes(matrix), 11 * 300 * bits // 30 * 4)

    def test_quantized_rows_are_those_of_the_plain_backend(self) -> None:
        weights = tensor(random.Random(3), 6, 10)
        for config in (*ROWS, *GROUPS):
            mine, theirs = LANES.matrix(weights, config), PLAIN.matrix(weights, config)
            self.assertEqual(LANES.rows(mine), PLAIN.rows(theirs))
            self.assertEqual(LANES.embed(mine, [5, 0, 5]), PLAIN.embed(theirs, [5, 0, 5]))

    def test_float_rows_are_those_that_it_computes_with(self) -> None:
        weights = tensor(random.Random(4), 6, 10)
        matrix = LANES.matrix(weights, None)
        self.assertEqual(LANES.embed(matrix, [3, 3, 0]), [LANES.rows(matrix)[token] for token in (3, 3, 0)])
        self.assertEqual(LANES.linear(matrix, [[0.0] * 9 + [1.0]]), [[row[9] for row in LANES.rows(matrix)]])
        for got, row in zip(LANES.rows(matrix), weights.rows(), strict=True):
            self.assertLessEqual(distance([got], [row]), max(map(abs, row)) / (2**14 - 2) * (1 + 1e-9))


class OperationsTest(unittest.TestCase):
    def test_norm(self) -> None:
        for seed in range(10):
            dice = random.Random(seed)
            x, [gain], epsilon = draw_rows(dice, 3, 1 + seed), draw_rows(dice, 1, 1 + seed), 10.0 ** -dice.randint(1, 9)
            wanted = [[v * g / sqrt(fsum(n * n for n in row) / len(row) + epsilon) for v, g in zip(row, gain)]
                      for row in x]
            with self.subTest(seed=seed):
                self.assertLess(distance(LANES.norm(x, gain, epsilon), wanted), 1e-12)
        self.assertEqual(LANES.norm([[0.0, 0.0]], [3.0, 4.0], 1e-5), [[0.0, 0.0]])
        for size in (1e100, 1e200, 1e300):  # where a square would overflow
            got = LANES.norm([[3 * size, -4 * size]], [1.0, 1.0], 1e-5)
            self.assertLess(distance(got, [[0.6 * sqrt(2), -0.8 * sqrt(2)]]), 1e-12)
        self.assertTrue(all(map(isnan, LANES.norm([[nan, 1.0]], [1.0, 1.0], 1e-5)[0])))

    def test_rotate_is_the_plain_one(self) -> None:
        for seed in range(10):
            dice = random.Random(seed)
            d, heads, theta = 2 * dice.randint(1, 5), dice.randint(1, 3), dice.choice((100.0, 1e4))
            x, positions = draw_rows(dice, 3, heads * d), [0, 1, dice.randrange(2**20)]
            with self.subTest(seed=seed):
                turns = rotary_frequencies(d, theta)
                self.assertEqual(LANES.rotate(x, positions, turns), PLAIN.rotate(x, positions, turns))

    def test_swiglu(self) -> None:
        gate, up = draw_rows(random.Random(1), 1, 9), draw_rows(random.Random(2), 1, 9)
        self.assertEqual(LANES.swiglu(gate, up), [[z / (1.0 + exp(-z)) * u for z, u in zip(gate[0], up[0])]])

    def test_swiglu_of_extremes(self) -> None:
        """exp(-z) leaves the range of a float below -709; neighbours in the row keep their numbers."""
        for z in (-1e308, -1e4, -746.0, -709.8, -700.1, -700.0):
            row = LANES.swiglu([[1.5, z]], [[2.0, 1e200]])[0]
            self.assertEqual(row[0], 1.5 / (1.0 + exp(-1.5)) * 2.0)
            self.assertLess(abs(row[1]), 1e-90, z)
        for z in (40.0, 700.0, 1e308, inf):
            self.assertEqual(LANES.swiglu([[z, -1e4]], [[1.0, 1.0]])[0][0], z)

    def test_a_row_depends_on_itself_alone(self) -> None:
        dice = random.Random(5)
        x = [*draw_rows(dice, 4, 10), [nan] * 10, [1e300] * 10]
        for config in (None, *ROWS, *GROUPS):
            matrix = LANES.matrix(tensor(dice, 7, 10), config)
            rows = LANES.linear(matrix, x)
            self.assertEqual(rows[:4], [LANES.linear(matrix, [row])[0] for row in x[:4]])
            self.assertTrue(all(map(isnan, rows[4])))


class DecoderTest(unittest.TestCase):
    """A whole model against the plain loops, and against itself."""

    def test_logits_of_random_models(self) -> None:
        """Within 0.02 (logits reach 3), in a prefill, a chunk and single tokens."""
        worst = 0.0
        for seed in range(24):
            dice = random.Random(seed)
            config = random_config(dice, group=(1, 2, 4)[seed % 3])
            weights, tokens = seeded_weights(config, seed), [dice.randrange(config.vocab_size) for _ in range(20)]
            mine, theirs = (in_chunks(Model(config, weights, backend), tokens, (7, 15, 16, 17))
                            for backend in (LANES, PLAIN))
            with self.subTest(seed=seed):
                self.assertLess(distance(mine, theirs), 0.02)
            worst = max(worst, distance(mine, theirs))
        self.assertGreater(worst, 1e-9)  # it is another arithmetic, and it was used

    def test_logits_of_quantized_models(self) -> None:
        """On the same codes as the plain loops: within 0.02; 0.1 with int4 a row, where x has least room."""
        for seed, (config, tolerance) in enumerate(zip((*ROWS, *GROUPS), (0.02, 0.1, 0.02, 0.02))):
            dice = random.Random(seed)
            shape = random_config(dice)
            weights, tokens = seeded_weights(shape, seed), [dice.randrange(shape.vocab_size) for _ in range(20)]
            mine, theirs = (in_chunks(Model(shape, weights, backend, config), tokens, (7, 15, 16, 17))
                            for backend in (LANES, PLAIN))
            with self.subTest(config=config):
                self.assertLess(distance(mine, theirs), tolerance)

    def test_int8_pages(self) -> None:
        """Keys and values as the plain loops store them; only the matrices are in lanes."""
        dice = random.Random(6)
        config = random_config(dice)
        weights, tokens = seeded_weights(config, 6), [dice.randrange(config.vocab_size) for _ in range(20)]
        mine, theirs = (in_chunks(Model(config, weights, backend), tokens, (7, 15, 16), kv_quantization="int8")
                        for backend in (LANES, PLAIN))
        self.assertLess(distance(mine, theirs), 0.02)

    def test_the_same_bits_in_any_chunks_pages_and_company(self) -> None:
        for seed in range(5):
            dice = random.Random(seed)
            config = random_config(dice)
            model = Model(config, seeded_weights(config, seed), LANES, dice.choice((None, *ROWS)))
            prompts = [[dice.randrange(config.vocab_size) for _ in range(dice.randint(1, 20))] for _ in range(4)]
            alone = [model.forward_uncached(prompt) for prompt in prompts]
            with self.subTest(seed=seed):
                for prompt, wanted in zip(prompts, alone):
                    for page_size in (1, 2, 3, 8, 16):
                        cuts = sorted(dice.sample(range(1, len(prompt)), dice.randint(0, len(prompt) - 1)))
                        self.assertEqual(in_chunks(model, prompt, cuts, page_size)[-1], wanted)
                    self.assertEqual(in_chunks(model, prompt, range(1, len(prompt)))[-1], wanted)
                tables = dice.sample(range(20), 20)
                pieces = [Piece(prompt, 0, tables[5 * i:5 * i + 5], True) for i, prompt in enumerate(prompts)]
                batch = Batch.of(pieces, 4)
                self.assertEqual(model.forward(batch, model.new_store(20, 4)), alone)

    def test_models_of_tiny_and_huge_weights(self) -> None:
        """No size of the weights breaks the forward pass: logits are numbers, or NaN where they overflow."""
        for size in (0.0, 1e-38, 1e-30, 1e-10, 1e-4, 1e4, 1e10, 1e30):
            weights = {name: Tensor(t.shape, array("f", [size * v if len(t.shape) == 2 else v for v in t.values]))
                       for name, t in WEIGHTS.items()}
            for backend in (LANES, PLAIN):
                logits = in_chunks(Model(CONFIG, weights, backend), [3, 1, 4, 1, 5], (2, 3))
                self.assertTrue(all(abs(x) < 1e200 for row in logits for x in row), size)

    def test_the_fixtures_golden_tokens(self) -> None:
        scenario = load_scenario(FIXTURE)
        assert scenario.golden
        with InferenceEngine.from_scenario(scenario, "cpu", num_pages=40) as engine:
            tokens = tokens_of([event for played in play(engine, scenario) for event in played.events])
        self.assertGreater(sum(map(len, tokens.values())), 100)
        for request_id, golden in scenario.golden.tokens.items():
            got = tokens[request_id]
            self.assertEqual(got, list(golden)[:len(got)] if request_id == "cancelled" else list(golden))


@unittest.skipUnless(STORIES.is_dir(), "SKIPPED: needs ../shared/models/stories260K")
class StoriesTest(unittest.TestCase):
    def test_greedy_tokens_and_logits(self, count: int = 64) -> None:
        """The plain loops' tokens; logits within 0.03 (they reach 25), the loss of the story within 1e-3 a token."""
        config, weights = read_llama2c(STORIES / "stories260K.bin")
        assert config.bos_token is not None
        known, rows = [config.bos_token], []
        model = Model(config, weights, PLAIN)
        store = model.new_store(1, count)
        for position in range(count):
            rows += model.forward(Batch.of([Piece(known[-1:], position, (0,), True)], count), store)
            known.append(rows[-1].index(max(rows[-1])))
        with InferenceEngine.from_checkpoint(STORIES, "cpu", page_size=7) as engine:
            self.assertEqual(engine.generate([known[:1]], count), [known[1:]])
            batch = Batch.of([Piece(known[:-1], 0, (0,), count)], count)
            mine = engine.model.forward(batch, engine.model.new_store(1, count))
        self.assertLess(distance(mine, rows), 0.03)
        losses = [fsum(log(fsum(exp(x - row[token]) for x in row)) for row, token in zip(logits, known[1:])) / count
                  for logits in (mine, rows)]
        self.assertLess(abs(losses[0] - losses[1]), 1e-3)


class ServingTest(EngineCase):
    def test_streams_under_pressure_are_those_of_each_alone(self) -> None:
        """Preemption by recomputing and swapping, shared prefixes, every policy: tokens and logprobs, bit by bit."""
        lanes = LanesBackend()
        alone = {}
        for name, ask in FIVE.items():
            engine = make_engine(lanes, page_size=CONTEXT, num_pages=1, budget_tokens=CONTEXT)
            ask.submit(engine, name)
            alone[name] = outcome(list(engine.stream(name)))
        for settings in SERVINGS:
            engine = make_engine(lanes, **{**TIGHT, **settings})
            self.submit(engine, FIVE)
            engine.run()
            with self.subTest(**settings):
                self.assertEqual({name: outcome(engine.poll(name)) for name in FIVE}, alone)
                self.check_empty(engine)

    def test_random_schedules(self) -> None:
        """Forks, cancels, faults, swaps, sharing, threads: ``scripts/fuzz.py`` on this backend."""
        model = Model(fuzz.CONFIG, seeded_weights(fuzz.CONFIG, 5), LanesBackend())
        self.addCleanup(fuzz.alone.cache_clear)
        fuzz.alone.cache_clear()
        with mock.patch.object(fuzz, "MODEL", model):
            for seed in (*range(2000, 2006), 2009):
                with self.subTest(seed=seed):
                    fuzz.run_threads(seed) if seed % 10 == 9 else fuzz.Fuzz(seed).run(60)


if __name__ == "__main__":
    unittest.main()
