"""What a second reading of the engine found: ids that pass to another request, policies and backends that misbehave,
interrupts in narrow places, and views that must not share what they show."""

from __future__ import annotations

import unittest
from math import nan
from threading import Thread
from unittest import mock

from starter.base.fault_kinds import MemoryCut
from starter.core import ModelRunner
from starter.engine import InferenceEngine
from starter.errors import BackendError, DuplicateRequestError, EngineError, RequestError
from starter.scheduler import ContinuousBatchScheduler, FirstComeFirstServed
from starter.schema import Request, SamplingParams
from tests.support import CONFIG, Ask, FaultyBackend, make_engine, outcome, solo
from tests.wings import needs_wing


class IdsThatPassOn(unittest.TestCase):
    def test_the_id_of_a_finished_sample_is_taken_while_its_request_is_live(self) -> None:
        """Otherwise a cancel of the request could mean either."""
        engine = make_engine()
        engine.submit([1, 2, 3], 30, request_id="r", sampling=SamplingParams(3.0, seed=3, n=2), stop_tokens=[5, 6, 7])
        stream = engine._core.streams["r"]
        while stream.samples[1].finish_reason is None:
            engine.step()
        self.assertIsNone(stream.samples[0].finish_reason)
        with self.assertRaisesRegex(DuplicateRequestError, "'r#1' is sample 1 of the live request 'r'"):
            engine.submit([7, 7], 20, request_id="r#1")
        engine.cancel("r")
        engine.submit([7, 7], 20, request_id="r#1")
        self.assertEqual(outcome(list(engine.stream("r#1"))), solo(Ask((7, 7), 20), "r#1")[0])


class NarrowInterrupts(unittest.TestCase):
    def test_while_a_fork_is_recorded(self) -> None:
        """The engine says that it has stopped, and can be closed."""
        engine = make_engine()
        engine.submit([1, 2, 3], 6, request_id="s", sampling=SamplingParams(1.0, n=3))
        record = engine._core.recorder.event

        def event(kind: str, **fields: object) -> None:
            if kind == "fork":
                raise KeyboardInterrupt
            record(kind, **fields)

        with mock.patch.object(engine._core.recorder, "event", event):
            self.assertRaises(KeyboardInterrupt, engine.step)
        self.assertRaisesRegex(EngineError, "has stopped", engine.step)
        engine.close()
        self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)

    def test_at_the_end_of_submit_the_engines_thread_is_awake(self) -> None:
        """Whatever line of ``submit`` the interrupt comes in, once the request is on record it is served."""
        with make_engine() as engine:
            engine.start()
            notify, calls = InferenceEngine._notify, []

            def interrupted(self: InferenceEngine) -> None:
                calls.append(1)
                if len(calls) == 1:
                    raise KeyboardInterrupt
                notify(self)

            with mock.patch.object(InferenceEngine, "_notify", interrupted):
                self.assertRaises(KeyboardInterrupt, engine.submit, [1, 2], 3, request_id="a")
            events: list[object] = []
            reader = Thread(target=lambda: events.extend(engine.stream("a")), daemon=True)
            reader.start()
            reader.join(60)
            self.assertEqual(len(events), 3)

    def test_a_stopped_engine_still_knows_the_request(self) -> None:
        engine = make_engine()
        with mock.patch.object(ContinuousBatchScheduler, "add", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, engine.submit, [1, 2], 3, request_id="a")
        self.assertEqual(engine.status("a").state, "waiting")
        engine.close()
        self.assertEqual(engine.poll("a")[-1].finish_reason, "cancelled")


class Misbehaving(unittest.TestCase):
    def test_a_policy_without_a_finite_rank(self) -> None:
        policy = FirstComeFirstServed()
        scheduler = ContinuousBatchScheduler(2, policy)
        for rank in (nan, float("inf")):
            with mock.patch.object(policy, "rank", return_value=rank, create=True), \
                    self.assertRaisesRegex(RequestError, "rank must be a finite number"):
                scheduler.submit(Request("r", (1,), 2))
            self.assertTrue(scheduler.idle)

    def test_a_policy_that_raises_at_a_preemption_loses_no_request(self) -> None:
        engine = make_engine(num_pages=3, page_size=4, max_running=2)
        for name in "ab":
            engine.submit([1, 2, 3], 6, request_id=name)
        engine.step()
        with mock.patch.object(engine.scheduler.policy, "rank", side_effect=OSError("no rank"), create=True):
            for _ in range(6):
                try:
                    engine.step()
                except OSError:
                    break
            else:
                self.fail("no request was preempted")
        engine.run()
        self.assertEqual([outcome(engine.poll(name)) for name in "ab"], [solo(Ask((1, 2, 3), 6))[0]] * 2)

    def test_a_row_that_is_not_as_long_as_the_vocabulary(self) -> None:
        class Longer(FaultyBackend):
            def to_lists(self, x):
                return [[*row, 99.0] for row in x]

        engine = make_engine(Longer())
        engine.submit([1, 2], 3, request_id="a")
        [event] = engine.stream("a")
        self.assertRegex(str(event.error), f"a row of {CONFIG.vocab_size + 1} logits; the vocabulary has")

    def test_a_row_too_few(self) -> None:
        engine = make_engine()
        engine.submit([1, 2], 3, request_id="a")
        with mock.patch.object(engine.model, "forward", return_value=[]):
            engine.step()
        self.assertRegex(str(engine.poll("a")[-1].error), "0 rows of logits; 1 were asked for")

    def test_a_backend_without_a_name(self) -> None:
        nameless = FaultyBackend()
        nameless.name = None  # type: ignore[assignment]
        with self.assertRaisesRegex(BackendError, "it has no name"):
            from starter.backend import load_backend
            load_backend(nameless)

    @needs_wing("workloads")
    def test_a_refused_budget_moves_no_fault_on(self) -> None:
        engine = make_engine()
        engine.inject([MemoryCut(step=0, pages=5, until=3)])
        before = engine.kv.free_pages, engine.timeline.recorded
        self.assertRaises(RequestError, engine.step, -1)
        self.assertEqual((engine.kv.free_pages, engine.timeline.recorded), before)

    @needs_wing("workloads")
    def test_another_runner_keeps_the_faults(self) -> None:
        engine = make_engine()
        engine.inject([MemoryCut(step=0, pages=5, until=9)])
        engine.submit([1, 2], 3)
        engine.step()
        engine.runner = ModelRunner(engine.model, engine.kv.store)
        engine.close()
        self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)


class Views(unittest.TestCase):
    def test_a_decision_and_its_event_share_nothing_that_can_be_changed(self) -> None:
        engine = make_engine()
        engine.submit([1, 2], 3, request_id="a")
        decision = engine.step()
        decision.reasons.clear()
        decision.found["x"] = 1
        [step] = [event for event in engine.timeline.events if event["event"] == "step"]
        self.assertEqual((list(step["reasons"]), step["found"]), (["a"], {}))

    def test_statistics_can_be_read_while_another_thread_serves(self) -> None:
        with make_engine() as engine:
            engine.start()
            failures: list[BaseException] = []

            def read() -> None:
                try:
                    while not done:
                        engine.kv.stats()
                        engine.kv.page(0)
                except BaseException as error:
                    failures.append(error)

            done: list[int] = []
            reader = Thread(target=read)
            reader.start()
            for _ in range(30):
                engine.generate([[1, 2, 3]] * 6, 3)
            done.append(1)
            reader.join()
            self.assertEqual(failures, [])


if __name__ == "__main__":
    unittest.main()
