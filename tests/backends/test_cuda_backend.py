"""The CUDA backend, its kernels run by the processor: tokens as of the plain backends (extra ``cuda``, no GPU)."""

from __future__ import annotations

import gc
import json
import pickle
import random
import subprocess
import sys
import tempfile
import unittest
from array import array
from pathlib import Path
from typing import Any
from unittest import mock

from starter import InferenceEngine, driver, load_backend, load_scenario
from starter.__main__ import main as starter_main
from starter.backend import Backend, Batch, Piece
from starter.base.weights import Tensor, seeded_weights
from starter.command.play import play, tokens_of
from starter.errors import BackendError
from starter.kv_cache import KVStore
from starter.model import Model
from starter.quantization import quantize
from starter.schema import QuantizationConfig, SamplingParams
from tests.extras import needs
from tests.models import random_config, split_prompts
from tests.paths import FIXTURE, ROOT
from tests.support import run_main
from tests.test_backend import check_operations

QUATRAINS = ROOT / "fixtures" / "quatrains.json"


def cuda(**options: Any) -> Any:
    return load_backend("cuda", device="cpu", **options)


def served(backend: Any, path: Path = FIXTURE, **settings: Any) -> dict[str, list[int]]:
    """The tokens of a fixture's requests."""
    scenario = load_scenario(path)
    with InferenceEngine.from_scenario(scenario, backend, **settings) as engine:
        return tokens_of([event for played in play(engine, scenario) for event in played.events])


@needs("cuda", "warp")
class CudaBackendTest(unittest.TestCase):
    def test_it_has_every_operation(self) -> None:
        from starter.backends.cuda.backend import CudaBackend
        from starter.backends.cuda.pages import CudaKVStore
        check_operations(self, CudaBackend, Backend)
        check_operations(self, CudaKVStore, KVStore)

    def test_logits_agree_with_the_plain_backend_in_a_mixed_batch(self) -> None:
        """A prefill from 0, a chunk in the middle and a decode in one batch, on permuted pages: within 1e-4, and 2e-2
        where numbers are stored in half as many bits."""
        for seed in range(30):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                config, page_size = random_config(rng, plain=seed % 2 == 0), rng.randint(1, 5)
                quantization = rng.choice((None, None, QuantizationConfig(8), QuantizationConfig(4, 5, False)))
                dtype, limit = rng.choice((("float32", 1e-4), ("float16", 2e-2)))
                weights = seeded_weights(config, seed)
                early, late = split_prompts(rng, config, page_size)
                results = []
                for backend in (load_backend("reference"), cuda(dtype=dtype, block=rng.choice((1, 32)))):
                    model = Model(config, weights, backend, quantization)
                    store = model.new_store(60, page_size)
                    self.assertEqual(model.forward(Batch.of(early, page_size), store), [])
                    results.append(model.forward(Batch.of(late, page_size), store))
                for plain, fast in zip(*results, strict=True):
                    self.assertLess(max(abs(a - b) for a, b in zip(plain, fast, strict=True)), limit)

    def test_parameters_come_back(self) -> None:
        config = random_config(random.Random(4), plain=False)
        weights = seeded_weights(config, 4)
        for quantization in (None, QuantizationConfig(4, 3, False)):
            wanted = Model(config, weights, load_backend("reference"), quantization).parameters()
            for name, rows in Model(config, weights, cuda(), quantization).parameters().items():
                for got, row in zip(rows, wanted[name], strict=True):
                    for a, b in zip(got, row, strict=True):
                        self.assertAlmostEqual(a, b, places=5)

    def test_packed_bytes(self) -> None:
        """int4 in groups of 32: half a byte a number, and 4 bytes of scale a group; 4 of the zero point for all."""
        backend, tensor = cuda(dtype="float16"), Tensor((2, 64), array("f", [0.5] * 128))
        for quantization, wanted in ((QuantizationConfig(4), 2 * 64 // 2 + 2 * 2 * 4 + 4), (None, 2 * 64 * 2)):
            self.assertEqual(backend.matrix_bytes(backend.matrix(tensor, quantization)), wanted)

    def test_store_reads_back_what_was_written_and_copies_pages(self) -> None:
        config = random_config(random.Random(2))
        for dtype, size in (("float32", 4), ("float16", 2)):
            model = Model(config, seeded_weights(config, 2), cuda(dtype=dtype))
            store, other = model.new_store(3, 2), model.new_store(5, 2)
            key, value = [float(i) for i in range(store.width)], [0.5 * i for i in range(store.width)]
            store.write(0, 1, key, value)
            store.copy_page(0, 2)
            self.assertEqual(store.read(2, 1), (key, value))
            other.copy_page(2, 4, store)
            store.copy_page(4, 1, other)
            self.assertEqual(store.read(1, 1), (key, value))
            self.assertEqual(store.page_bytes, 2 * size * 2 * store.width)

    def test_pages_that_are_swapped_out_take_nothing_of_the_device(self) -> None:
        config, backend = random_config(random.Random(2)), cuda()
        model = Model(config, seeded_weights(config, 2), backend)
        held = backend.device.memory.live
        host = model.new_store(100, 2, host=True)
        self.assertEqual(backend.device.memory.live, held)
        store = model.new_store(2, 2)
        self.assertEqual(backend.device.memory.live, held + 2 * store.page_bytes)
        key, value = [float(i) for i in range(store.width)], [0.5 * i for i in range(store.width)]
        store.write(0, 1, key, value)
        host.copy_page(0, 99, store)
        store.copy_page(99, 1, host)
        self.assertEqual(store.read(1, 1), (key, value))

    def test_nan_in_free_pages_reaches_no_output(self) -> None:
        config = random_config(random.Random(1))
        model = Model(config, seeded_weights(config, 1), cuda(block=32))
        clean: Any = model.new_store(4, 4)
        dirty: Any = model.new_store(4, 4)
        for store, number in ((clean, 0.0), (dirty, float("nan"))):
            store.keys.fill_(number)
            store.values.fill_(number)
        pieces = [Piece([1, 2, 0], 0, (2,), wants_logits=True), Piece([1], 0, (0,), wants_logits=True)]
        logits = [[list(row) for row in model.forward(Batch.of(pieces, 4), store)] for store in (clean, dirty)]
        self.assertEqual(*logits)

    def test_two_engines_in_two_threads(self) -> None:
        """In a process of its own: on the processor, launches that meet crash it."""
        script = """
import threading
from starter import InferenceEngine, load_backend, load_scenario
scenario = load_scenario("fixtures/tiny_model.json")
engines = [InferenceEngine.from_scenario(scenario, load_backend("cuda", device="cpu"), num_pages=60) for _ in "ab"]
wanted, found = [engine.generate([[1, 2, 3]], 12) for engine in engines], []
def serve(engine):
    found.extend(engine.generate([[1, 2, 3]], 12) for _ in range(15))
threads = [threading.Thread(target=serve, args=[engine]) for engine in engines]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
assert found == wanted[:1] * 30, found
"""
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_greedy_sampling_takes_two_numbers_of_a_row(self) -> None:
        """Its logits stay on the device; only who draws a token looks at all of them."""
        from starter.backends.cuda.backend import DeviceRow
        with InferenceEngine.from_scenario(load_scenario(FIXTURE), cuda()) as engine:
            with mock.patch.object(DeviceRow, "__getitem__", side_effect=AssertionError("logits were fetched")):
                engine.generate([[1, 2, 3], [4]], 5)
            with mock.patch.object(DeviceRow, "__getitem__", autospec=True, side_effect=DeviceRow.__getitem__) as fetch:
                engine.generate([[1, 2, 3]], 2, SamplingParams(temperature=1.0, seed=1))
            self.assertEqual(fetch.call_count, 2)


@needs("cuda", "warp")
class ServedTest(unittest.TestCase):
    """The fixture through the whole engine: the golden tokens, which the reference in double precision has made."""

    def check_golden(self, tokens: dict[str, list[int]], path: Path = FIXTURE) -> None:
        golden = load_scenario(path).golden
        assert golden
        for request_id, wanted in golden.tokens.items():
            got = tokens[request_id]
            self.assertEqual(got, list(wanted)[:len(got)] if request_id == "cancelled" else list(wanted), request_id)

    def test_batched_chunked_preempted_and_shared(self) -> None:
        backend = cuda()
        for settings in ({}, {"num_pages": 40, "batching": "none"}, {"budget_tokens": 6, "prefix_sharing": False},
                         {"preemption": "swap", "host_pages": 40}, {"num_pages": 60, "page_size": 3}):
            with self.subTest(settings=settings):
                self.check_golden(served(backend, **settings))

    def test_in_blocks_of_threads(self) -> None:
        self.check_golden(served(cuda(block=32), num_pages=40))

    def test_without_a_cache(self) -> None:
        tokens = []
        for use_cache in (True, False):
            with InferenceEngine.from_scenario(load_scenario(FIXTURE), cuda(), use_cache=use_cache) as engine:
                tokens.append(engine.generate([[1, 2, 3], [4]], 5))
        self.assertEqual(*tokens)

    def test_a_trained_model(self) -> None:
        self.check_golden(served(cuda(), QUATRAINS), QUATRAINS)

    def test_quantized_as_on_other_backends(self) -> None:
        for quantization, other in (("int8", "cpu"), ("int4", "numpy"), ("int4-search", "cpu")):
            with self.subTest(quantization=quantization):
                wanted = served(other, num_pages=40, quantization=quantization)
                self.assertEqual(served(cuda(), num_pages=40, quantization=quantization), wanted)

    def test_half_precision_writes_poems(self) -> None:
        """Nearly the tokens of float32: of the fixture's outputs, most."""
        golden = load_scenario(FIXTURE).golden
        assert golden
        tokens = served(cuda(dtype="float16"), num_pages=40)
        equal = sum(tokens[name] == list(wanted) for name, wanted in golden.tokens.items())
        self.assertGreaterEqual(equal, len(tokens) // 2)

    def test_steps_in_the_engines_own_thread(self) -> None:
        with InferenceEngine.from_scenario(load_scenario(FIXTURE), cuda()) as engine:
            alone = engine.generate([[1, 2, 3], [4]], 5)
            engine.start()
            self.assertEqual(engine.generate([[1, 2, 3], [4]], 5), alone)

    def test_from_the_command_line(self) -> None:
        run = run_main(driver.main, "--fixture", FIXTURE, "--backend", "cuda", "--device", "cpu", "--json")
        self.assertEqual((run.code, run.err), (0, ""))
        document = json.loads(run.out)
        self.assertEqual((document["backend"], {*document["golden"].values()}), ("cuda", {"equal"}))

    def test_a_timeline_of_the_processor_is_replayed_on_it(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            timeline = Path(folder) / "run.jsonl"
            run = run_main(driver.main, "--fixture", FIXTURE, "--backend", "cuda", "--device", "cpu", "--quiet",
                           "--clock", "virtual", "--timeline", timeline)
            self.assertEqual((run.code, run.err), (0, ""))
            run = run_main(starter_main, "replay", timeline, "--device", "cpu")
            self.assertEqual((run.code, run.err), (0, ""))
            self.assertRegex(run.out, r"All \d+ events are the same\.")


@needs("cuda", "warp")
class MemoryTest(unittest.TestCase):
    def test_too_many_pages_are_refused_before_any_is_allocated_and_fewer_are_served(self) -> None:
        backend = cuda(free_bytes=1_000_000, rows=16)
        with self.assertRaisesRegex(BackendError, r"already held 310,080 \+ K/V pages 1,228,800 \+ scratch 68,864 = "
                                                  r"1,607,744 bytes, but cpu may use 900,000: 0.9 of the 1,000,000"):
            served(backend, num_pages=400)
        gc.collect()
        self.assertLess(backend.memory.peak, 400_000)
        self.assertEqual(served(backend), served(cuda()))
        self.assertLessEqual(backend.memory.peak, backend.memory.limit)

    def test_weights_that_do_not_fit(self) -> None:
        backend = cuda(free_bytes=100_000)
        with self.assertRaisesRegex(BackendError, r"already held 0 \+ weights 310,080 = 310,080 bytes, but cpu may "
                                                  "use 90,000: 0.9 of the 100,000"):
            served(backend)
        self.assertEqual(backend.memory.peak, 0)

    def test_weights_take_what_was_planned(self) -> None:
        config = random_config(random.Random(3))
        weights = seeded_weights(config, 3)
        for dtype, quantization in (("float32", None), ("float16", None), ("float32", QuantizationConfig(8, 5)),
                                    ("float32", QuantizationConfig(4, 3, symmetric=False)),
                                    ("float16", QuantizationConfig(4, None))):
            with self.subTest(dtype=dtype, quantization=quantization):
                backend = cuda(dtype=dtype)
                model = Model(config, weights, backend, quantization)
                self.assertLessEqual(backend.memory.live, backend.memory.planned)
                self.assertGreater(backend.memory.live + 200, backend.memory.planned)  # stacks share a zero point
                self.assertGreater(model.weight_bytes, 0)

    def test_planned_scratch_covers_what_a_step_takes(self) -> None:
        """The largest steps there can be, of models with every feature: the plan is an upper bound, and no wild one."""
        for seed in range(12):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                config = random_config(rng, plain=False)
                backend = cuda(rows=40)
                model = Model(config, seeded_weights(config, seed), backend)
                store = model.new_store(40, 4)
                pieces = [Piece([1], 5, (i, i + 20), wants_logits=True) for i in range(20)]
                pieces.append(Piece([1] * 20, 0, range(35, 40), wants_logits=True))
                for _ in range(2):
                    model.forward(Batch.of(pieces, 4), store)
                self.assertLessEqual(backend.memory.peak, backend.memory.planned)
                held = model.weight_bytes + 40 * store.page_bytes
                self.assertGreater(3 * (backend.memory.peak - held), backend.memory.planned - held)

    def test_a_long_prompt_that_fits_alone_is_served_beside_others(self) -> None:
        backend = cuda()
        prompts = [[i % 9 + 1] * 50 for i in range(4)]
        with InferenceEngine.from_scenario(load_scenario(FIXTURE), backend, budget_tokens=256, num_pages=60,
                                           prefix_sharing=False) as engine:
            wanted = [engine.generate([prompt], 3)[0] for prompt in prompts]
            base, backend.memory.peak = backend.memory.live, backend.memory.live
            engine.generate(prompts[:1], 3)
            backend.memory.limit = base + 11 * (backend.memory.peak - base) // 10
            self.assertEqual(engine.generate(prompts, 3), wanted)

    def test_out_of_memory_ends_the_request_and_not_the_engine(self) -> None:
        """In one step a prompt too long for what memory is left, and a short one: the short one goes on, its tokens the
        same; and the long one is served when there is room again."""
        long, short = [1] * 60, [2, 3]
        backend = cuda()
        with InferenceEngine.from_scenario(load_scenario(FIXTURE), backend, budget_tokens=64, num_pages=40,
                                           prefix_sharing=False) as engine:
            wanted = engine.generate([long, short], 6)
            backend.memory.limit = backend.memory.live + 30_000
            for request_id, prompt in (("long", long), ("short", short)):
                engine.submit(prompt, 6, request_id=request_id)
            events = {name: list(engine.stream(name)) for name in ("short", "long")}
            self.assertEqual([event.token for event in events["short"]], wanted[1])
            self.assertEqual([event.finish_reason for event in events["long"]], ["error"])
            self.assertRegex(str(events["long"][0].error), "out of memory: .* bytes more than the .* already held")
            self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)
            backend.memory.limit = float("inf")
            self.assertEqual(engine.generate([long, short], 6), wanted)

    def test_a_device_that_fails_in_a_step_ends_the_request_and_not_the_engine(self) -> None:
        from starter.backends.cuda import device as cuda_device
        with InferenceEngine.from_scenario(load_scenario(FIXTURE), cuda()) as engine:
            wanted = engine.generate([[1, 2, 3]], 4)
            failure = RuntimeError("Failed to allocate 1024 bytes on device 'cuda:0'")
            with (mock.patch.object(cuda_device.wp, "empty", side_effect=failure),
                  self.assertRaisesRegex(BackendError, "out of memory: cpu did not give")):
                engine.generate([[1, 2, 3]], 4)
            self.assertEqual(engine.generate([[1, 2, 3]], 4), wanted)

    def test_everything_is_given_back(self) -> None:
        backend = cuda()
        served(backend, num_pages=40)
        backend._turned = [], (), None
        gc.collect()
        self.assertEqual(backend.memory.live, 0)


@needs("cuda", "warp")
class RefusedTest(unittest.TestCase):
    def test_a_device_that_is_not_there(self) -> None:
        with self.assertRaisesRegex(BackendError, r"no device 'cuda:99' here: Warp finds \d+ CUDA devices; device="):
            load_backend("cuda", device="cuda:99")

    def test_what_is_no_option(self) -> None:
        for options, problem in (({"device": "gpu"}, "device must be 'cuda:0'"), ({"device": 0}, "not 0"),
                                 ({"device": "cuda:"}, "device must be"), ({"block": 33}, "a block has 1, 32, 64"),
                                 ({"dtype": "bfloat16"}, "dtype must be 'float32' or 'float16', not 'bfloat16'"),
                                 ({"free_bytes": -1}, "free memory is a number of bytes")):
            with self.subTest(options=options), self.assertRaisesRegex(BackendError, problem):
                load_backend("cuda", **{"device": "cpu", **options})

    def test_scales_of_64_bits_and_weights_beyond_half_precision(self) -> None:
        huge = quantize([[1e300, -1e300]], QuantizationConfig(8))
        tensor = Tensor((1, 2), array("f", [1.0, 1e6]))
        with (mock.patch("starter.backends.cuda.backend.quantize", return_value=huge),
              self.assertRaisesRegex(BackendError, "scales of 64 bits")):
            cuda().matrix(tensor, QuantizationConfig(8))
        with self.assertRaisesRegex(BackendError, "beyond the largest number of float16"):
            cuda(dtype="float16").matrix(tensor, None)

    def test_a_second_process(self) -> None:
        with self.assertRaisesRegex(BackendError, "take workers=1"):
            pickle.dumps(cuda())


@needs("cuda", "warp")
class CompileTest(unittest.TestCase):
    def test_all_kernels_compile_for_the_card_without_one(self) -> None:
        """Ahead of time for sm_89, to PTX and to machine code; nothing is spilled."""
        import warp as wp

        from scripts import compile_kernels
        from starter.backends.cuda import int8_kernels as warp_int8_kernels
        from starter.backends.cuda import kernels as warp_kernels
        with tempfile.TemporaryDirectory() as folder:
            run = run_main(compile_kernels.main, "--out", folder)
            record = json.loads((Path(folder) / "kernels.json").read_text(encoding="utf-8"))
            compiled_to = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.ptx")]
        self.assertEqual((run.code, [".target sm_89" in ptx for ptx in compiled_to]), (0, [True, True]))
        compiled = {kernel["name"].rpartition("_")[0]: kernel for kernel in record["kernels"]}
        kernels = {name for module in (warp_kernels, warp_int8_kernels) for name, made in vars(module).items()
                   if isinstance(made, wp.Kernel)}
        self.assertEqual({*compiled}, kernels)
        for name, kernel in compiled.items():
            with self.subTest(kernel=name):
                self.assertLessEqual(kernel["registers"], 128)  # 512 threads and more at a time on a multiprocessor
                self.assertEqual(kernel["stack"], 40 if name == "turns" else 0)  # sine and cosine in double keep a list


class WithoutWarpTest(unittest.TestCase):
    def test_how_to_get_it(self) -> None:
        with (mock.patch("starter.backend.find_spec", lambda name, package=None: package),
              self.assertRaisesRegex(BackendError, r"needs warp.*pip install '\.\[cuda\]'")):
            load_backend("cuda")

    def test_a_device_is_for_this_backend_only(self) -> None:
        with self.assertRaisesRegex(BackendError, "device can be chosen for backend 'cuda' only, not for 'cpu'"):
            load_backend("cpu", device="cpu")
        run = run_main(driver.main, "--fixture", FIXTURE, "--backend", "numpy", "--dtype", "float16")
        self.assertEqual((run.code, "dtype can be chosen for backend 'cuda' only" in run.err), (2, True))


if __name__ == "__main__":
    unittest.main()
