"""Real child processes: they compute the same, report what goes wrong, and are gone when nobody needs them.

What several processes compute, and for whom, is tested in ``test_parallel.py``. Times here are only a safety net: a
process that hangs fails the test.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from starter import InferenceEngine, load_scenario
from starter.backend import Piece, ReferenceBackend, load_backend
from starter.backends.workers.parallel import ParallelModel
from starter.backends.workers.process import Worker, WorkerLost
from starter.errors import BackendError
from starter.model import Loaded, Model
from starter.schema import EngineSettings
from starter.timeline import VirtualClock
from tests.paths import FIXTURE, ROOT
from tests.support import CONFIG, FIVE, HEALTHY, ROOMY, TIGHT, TOKENIZER, WEIGHTS, EngineCase, FaultyBackend, outcome

PATIENCE = 120  # seconds until a test gives up, also on a machine that does much else
LANES = Model(CONFIG, WEIGHTS, load_backend("cpu"))


class NoTraveller(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("no luck with token 18")
        self.why = lambda: 18


class Moody(ReferenceBackend):
    """Prints, or fails in two ways, when it sees certain tokens."""

    def embed(self, table: Any, tokens: Sequence[int]) -> Any:
        if 17 in tokens:
            print("seventeen")
        if 18 in tokens:
            raise NoTraveller
        if 19 in tokens:
            raise OSError("no luck with token 19")
        return super().embed(table, tokens)


class Trap:
    """Pickles; raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("a trap",)


def engine_on(model: Model = HEALTHY.model, **settings: object) -> InferenceEngine:
    return InferenceEngine(Loaded(model, TOKENIZER, {}), EngineSettings().override({"workers": 2, **settings}),
                           VirtualClock())


def worker_of(engine: InferenceEngine) -> Worker:
    assert isinstance(engine.model, ParallelModel)
    [worker] = engine.model.crew[1:]
    assert isinstance(worker, Worker)
    return worker


@contextmanager
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that are started meanwhile."""
    processes: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(real(*arguments, **options))
        return processes[-1]

    with mock.patch("starter.backends.workers.process.subprocess.Popen", popen):
        yield processes


class TwoProcesses(EngineCase):
    def results(self, engine: InferenceEngine, kill: bool = False) -> dict[str, object]:
        """Tokens and logprobs of five requests; after five steps the child may be killed."""
        self.submit(engine, FIVE)
        for _ in range(5):
            engine.step()
        if kill:
            worker_of(engine)._process.kill()
        engine.run()
        return {name: outcome(engine.poll(name)) for name in FIVE}

    def test_the_same_tokens_though_the_child_is_killed(self) -> None:
        for model, settings in ((HEALTHY.model, {"preemption": "swap", "kv_quantization": "int8"}),
                                (LANES, {"prefix_sharing": True})):
            with self.subTest(backend=model.backend), engine_on(model, **TIGHT, **settings) as engine:
                expected = self.results(engine_on(model, **TIGHT, **settings, workers=1))
                self.assertEqual(self.results(engine), expected)
                self.assertRegex(repr(engine.model), r"this process: \d\d tokens; worker 1 runs as process \d+: \d\d ")
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    self.assertEqual(self.results(engine, kill=True), expected)
                    self.assertEqual(self.results(engine), expected)  # new requests, on who is left
                [warning] = told
                self.assertRegex(str(warning.message), "^worker 1 ended with code -?[0-9]+; the other processes go on")
                self.check_empty(engine)

    def test_the_engines_own_thread(self) -> None:
        with engine_on(**TIGHT) as engine:
            engine.start()
            self.submit(engine, FIVE)
            for name, ask in FIVE.items():
                self.check_ask(list(engine.stream(name)), name, ask)
            self.submit(engine, FIVE)  # and is closed while they run: nobody is warned

    def test_an_interrupted_step_is_done_again(self) -> None:
        """The child is computing when it happens; its answer is not taken for the next one's."""
        with engine_on(**ROOMY) as engine:
            self.submit(engine, FIVE)
            for _ in range(6):
                with mock.patch.object(Model, "forward", side_effect=KeyboardInterrupt):
                    self.assertRaises(KeyboardInterrupt, engine.step)
                engine.step()
            self.assertGreater(engine.model.work[1].tokens, 6)
            self.check_outcomes(engine, FIVE)

    def test_failures_come_back_with_type_and_text(self) -> None:
        with engine_on(Model(CONFIG, WEIGHTS, Moody())) as engine:
            worker, key = worker_of(engine), engine.kv.store.key
            for token, kind, text in ((19, OSError, "^no luck with token 19$"),
                                      (18, BackendError, "^NoTraveller: no luck with token 18$")):
                answer = worker.ask("forward", key, [Piece([token], 0, (0,), True)])
                self.assertRaisesRegex(kind, text, answer)
            [row] = worker.ask("forward", key, [Piece([5], 0, (0,), True)])()  # it is as well as ever
            self.assertEqual(row.tolist(), HEALTHY.model.forward_uncached([5]))

    def test_a_child_that_cannot_be_started(self) -> None:
        moody = Moody()
        moody.trap = Trap()
        for backend, words in ((FaultyBackend(), "FaultyBackend"), (moody, "a trap")):
            with self.subTest(words), started() as processes:
                try:
                    engine_on(Model(CONFIG, WEIGHTS, backend), workers=3)
                except BackendError as error:
                    self.assertRegex(str(error), f"^worker 1 could not be started: .*{words}")
                    self.assertEqual(len(processes), 2)
                    for process in processes:  # before the error is forgotten, and garbage is collected
                        process.wait(PATIENCE)
                else:
                    self.fail("it was started")
        with mock.patch.object(sys, "executable", "no such python"):
            self.assertRaisesRegex(BackendError, "^worker 1 could not be started: ", engine_on)


class NothingIsLeft(unittest.TestCase):
    def test_after_an_interrupted_start(self) -> None:
        with started() as processes, mock.patch.object(Worker, "wait_until_ready", side_effect=KeyboardInterrupt):
            try:
                engine_on()
            except KeyboardInterrupt:  # before garbage is collected
                [process] = processes
                self.assertIsNotNone(process.returncode)

    def test_after_close_and_after_garbage_collection(self) -> None:
        with warnings.catch_warnings(), started() as processes:
            warnings.simplefilter("error")
            engine = engine_on()
            engine.generate([[1, 2], [3]], 3)
            worker = worker_of(engine)
            engine.close()
            engine.close()
            self.assertRaises(WorkerLost, worker.ask, "read")
            self.assertIn("worker 1 ended", repr(engine.model))
            dropped = engine_on()
            dropped.generate([[1, 2], [3]], 3)
            self.assertIsNone(processes[1].returncode)
            del dropped
            gc.collect()
        for process in processes:
            self.assertIsNotNone(process.returncode)
            self.assertTrue(process.stdin.closed and process.stdout.closed)

    def script(self, *lines: str) -> list[str]:
        """Lines that make an engine of two processes, and go on: no file, no ``__main__`` guard."""
        return [f"import sys; sys.path[:0] = [{str(ROOT)!r}]", "from tests.backends.test_workers_process import *",
                "scenario = load_scenario(FIXTURE)", *lines]

    def test_a_script_from_standard_input(self) -> None:
        """It need not close anything, and what the child prints disturbs nobody."""
        lines = self.script("engine = InferenceEngine.from_scenario(scenario, Moody(), workers=2)",
                            "print(engine.generate([[17], [17], [17, 4]], 3))")
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run([sys.executable, "-X", "dev", "-"], input="\n".join(lines), capture_output=True,
                              encoding="utf-8", env=buffered, timeout=PATIENCE)
        with InferenceEngine.from_scenario(load_scenario(FIXTURE), "reference") as engine:
            expected = engine.generate([[17], [17], [17, 4]], 3)
        printed = done.stdout.splitlines() + done.stderr.splitlines()
        self.assertEqual([line for line in printed if line != "seventeen"], [str(expected)])
        self.assertTrue("seventeen" in done.stdout and "seventeen" in done.stderr)  # the parent's, and the child's
        self.assertEqual(done.returncode, 0)

    def test_a_parent_that_is_killed(self) -> None:
        """The child holds the standard error it was given: when that is closed, the child is gone."""
        lines = self.script("engine = InferenceEngine.from_scenario(scenario, workers=2)",
                            "print(engine.generate([[5, 6], [7]], 2), flush=True)", "sys.stdin.read()")
        parent = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with parent:
            assert parent.stdout
            self.assertTrue(parent.stdout.readline())
            parent.kill()
            self.assertEqual(parent.communicate(timeout=PATIENCE), (b"", b""))


if __name__ == "__main__":
    unittest.main()
