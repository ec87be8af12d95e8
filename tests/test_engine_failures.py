"""What may not disturb anybody else: cancels, failing backends, interrupts, outside holders of pages."""

from __future__ import annotations

import sys
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, product
from threading import Thread
from time import sleep
from types import FrameType

from starter.engine import InferenceEngine
from starter.errors import EngineError
from starter.kv_cache import KVHandle
from starter.metrics import Metrics
from starter.scheduler import REFUSAL_LIMIT
from starter.schema import SamplingParams, TokenEvent
from starter.timeline import Event
from tests.support import (
    FIVE,
    HEALTHY_FIVE,
    POISON,
    ROOMY,
    SERVINGS,
    TIGHT,
    Ask,
    EngineCase,
    FaultyBackend,
    failing_at,
    failing_on,
    make_engine,
    outcome,
    solo,
)
from tests.wings import has_wing, needs_wing

if has_wing("observe"):
    from starter.observe.audit import Audit


class Cancel(EngineCase):
    def test_any_request_after_any_number_of_steps(self) -> None:
        """V3, K001: no token after it, pages free at once, the others unchanged."""
        for settings, name in product(({**TIGHT, "preemption": "swap", "prefix_sharing": True}, TIGHT), "ace"):
            for k in count():
                engine = make_engine(**settings)
                self.submit(engine, FIVE)
                for _ in range(k):
                    engine.step()
                if not engine.active:
                    break
                with self.subTest(settings=settings, name=name, k=k):
                    ended = engine.status(name).finish_reason
                    engine.cancel(name)
                    engine.kv.check()
                    self.assertNotIn(name, engine.active)
                    if not ended:
                        self.assertEqual([(e.token, e.index, e.finish_reason) for e in engine.poll(name)],
                                         [(None, 0, "cancelled")])  # unread tokens are withheld
                    others = {other: ask for other, ask in FIVE.items() if ended or other != name}
                    self.check_outcomes(engine, others)

    def test_inside_a_stream_loop(self) -> None:
        """K046: the last event's index goes on from what was read."""
        for last in range(5):
            engine = make_engine(**TIGHT)
            self.submit(engine, FIVE)
            events = []
            for event in engine.stream("a"):
                events.append(event)
                if event.index == last:
                    engine.cancel("a")
                    engine.cancel("a")  # again: does nothing
            self.check_events(events, ("cancelled",))
            self.assertEqual(outcome(events), solo(FIVE["a"])[0][:last + 1])
            self.check_outcomes(engine, {name: ask for name, ask in FIVE.items() if name != "a"})

    def test_while_the_decoder_computes(self) -> None:
        """K046, K044: also when the id is used again at once; the row that is being computed goes to nobody."""
        for k, again in product(range(8), (False, True)):
            engine = make_engine(backend := FaultyBackend(), **TIGHT)
            self.submit(engine, FIVE)
            for _ in range(k):
                engine.step()
            if engine.status("a").finish_reason:
                break

            def cancel(moment: str, tokens: Sequence[int], engine=engine, backend=backend, again=again) -> None:
                backend.fault = lambda moment, tokens: None
                engine.cancel("a")
                if again:
                    engine.submit([7, 7], 4, request_id="a")

            backend.fault = cancel
            old = engine.stream("a")
            engine.step()
            self.assertEqual([event.finish_reason for event in old], ["cancelled"])
            others = {**FIVE, "a": Ask((7, 7), 4)}
            self.check_outcomes(engine, others if again else {n: ask for n, ask in FIVE.items() if n != "a"})
        self.assertGreater(k, 4)

    def test_a_failure_of_the_old_request_is_none_of_the_new_one(self) -> None:
        """Cancelled and submitted again while the decoder computes, which then fails."""
        engine = make_engine(backend := FaultyBackend())
        engine.submit([1, 2, 3], 5, request_id="x")
        old, new = engine.stream("x"), Ask((7, 7), 4)

        def fault(moment: str, tokens: Sequence[int]) -> None:
            if not engine.status("x").finish_reason and len(tokens) == 3:
                engine.cancel("x")
                new.submit(engine, "x")
            raise OSError("too late")

        backend.fault = fault
        engine.step()
        backend.fault = lambda moment, tokens: None
        self.assertEqual([event.finish_reason for event in old], ["cancelled"])
        self.check_outcomes(engine, {"x": new})

    def test_of_a_finished_request_does_nothing(self) -> None:
        engine = make_engine()
        self.submit(engine, FIVE)
        engine.run()
        before = self.picture(engine), engine.timeline.recorded
        for name in FIVE:
            engine.cancel(name)
        self.assertEqual((self.picture(engine), engine.timeline.recorded), before)
        self.check_outcomes(engine, FIVE)

    def test_neighbours_that_are_sampled_draw_the_same(self) -> None:
        """K073: A with a seed; B beside it without one, cancelled at any time."""
        asks = {"A": Ask((1, 2), 12, SamplingParams(1.0, seed=42)), "B": Ask((3,), 12, SamplingParams(1.0))}
        for k in range(12):
            engine = make_engine()
            self.submit(engine, asks)
            for _ in range(k):
                engine.step()
            engine.cancel("B")
            self.check_outcomes(engine, asks, failed="B")

    def test_all_at_once_leaves_no_stale_gauge(self) -> None:
        """K094"""
        engine = make_engine(**TIGHT)
        self.submit(engine, FIVE)
        for _ in range(4):
            engine.step()
        for name in engine.active:
            engine.cancel(name)
        metrics = engine.metrics()
        self.assertEqual((metrics.running, metrics.waiting, metrics.kv_pages, metrics.kv_bytes), (0, 0, 0, 0))
        self.assertGreater(metrics.kv_peak_bytes, 0)


class Failures(EngineCase):
    """A request that fails ends with finish_reason "error" and the reason; its neighbours' tokens stay the same."""

    def test_a_passing_fault_of_the_backend_is_not_noticed(self) -> None:
        """The k-th time something is computed fails, before it began or with keys and values half written."""
        for moment, k in product(("start", "middle"), range(0, 20, 3)):
            with self.subTest(moment=moment, k=k):
                engine = make_engine(failing_at(k, moment, OSError("passing")), **TIGHT)
                self.submit(engine, FIVE)
                self.check_outcomes(engine, FIVE)

    def test_only_the_request_at_fault_ends(self) -> None:
        for settings in (TIGHT, {**TIGHT, "budget_tokens": 2}, {**ROOMY, "use_cache": False}):
            with self.subTest(settings=settings):
                engine = make_engine(failing_on(POISON), **settings)
                self.submit(engine, HEALTHY_FIVE)
                engine.submit([1, 2, POISON, 4], 5, request_id="bad")
                events = list(engine.stream("bad"))
                self.check_events(events, ("error",))
                self.assertEqual(events[-1].error, f"OSError: no luck with token {POISON}")
                self.check_outcomes(engine, HEALTHY_FIVE)
                self.assertGreater(len(HEALTHY_FIVE), 2)

    def test_a_backend_that_always_fails_ends_everybody_once(self) -> None:
        def fault(moment: str, tokens: Sequence[int]) -> None:
            raise MemoryError("no memory")

        engine = make_engine(FaultyBackend(fault), **TIGHT)
        self.submit(engine, FIVE)
        engine.run()
        for name in FIVE:
            (event,) = engine.poll(name)
            self.assertEqual((event.index, event.token, event.finish_reason, event.error),
                             (0, None, "error", "MemoryError: no memory"))
        self.check_empty(engine)
        self.assertEqual(engine.metrics().finished, {"stop": 0, "length": 0, "cancelled": 0, "error": 5})

    def test_rows_that_no_token_can_be_chosen_from_end_that_request_alone(self) -> None:
        """K076: NaN, or not even a row."""
        class Headless(FaultyBackend):
            def to_lists(self, x):
                return [[] if token in self.spoiled else row for token, row in zip(self.picked, x)]

        for kind, sampling in product((FaultyBackend, Headless), (SamplingParams(), SamplingParams(1.0))):
            engine = make_engine(kind(spoiled=[POISON]), **TIGHT)
            self.submit(engine, {**HEALTHY_FIVE, "bad": Ask((1, POISON), 5, sampling)})
            (event,) = engine.stream("bad")
            self.assertEqual((event.index, event.token, event.finish_reason), (0, None, "error"))
            if kind is FaultyBackend:
                self.assertRegex(event.error, "BackendError: the logits hold NaN")
            self.check_outcomes(engine, HEALTHY_FIVE)

    def test_an_interrupt_loses_nothing(self) -> None:
        """KeyboardInterrupt at any time before the tokens are chosen; whoever goes on gets the right ones."""
        asks = {**FIVE, "sampled": Ask((4, 4), 6, SamplingParams(1.0))}
        interrupts = 0
        for serving, moment, k in product(SERVINGS[:3], ("start", "middle"), range(0, 18, 6)):
            with self.subTest(serving=serving, moment=moment, k=k):
                engine = make_engine(failing_at(k, moment, KeyboardInterrupt()), **TIGHT, **serving)
                self.submit(engine, asks)
                while engine.active:
                    try:
                        engine.run()
                    except KeyboardInterrupt:
                        interrupts += 1
                        engine.kv.check()
                self.check_outcomes(engine, asks)
        self.assertEqual(interrupts, 3 * 2 * 3)

    def test_an_interrupt_while_tokens_are_chosen_loses_nothing_either(self) -> None:
        class InterruptingRow(list):
            def index(self, *arguments):
                raise KeyboardInterrupt

            def __iter__(self):
                raise KeyboardInterrupt

        class Interrupting(FaultyBackend):
            def to_lists(self, x):
                return [InterruptingRow(row) if token == POISON else row for token, row in zip(self.picked, x)]

        sampled = {"A": Ask((1, 2), 9, SamplingParams(1.0)), "B": Ask((3,), 9, SamplingParams(1.0, seed=3))}
        engine = make_engine(Interrupting())
        self.submit(engine, {**sampled, "last": Ask((POISON,), 1)})  # it is chosen after A and B have drawn
        self.assertRaises(KeyboardInterrupt, engine.step)
        engine.cancel("last")
        engine.poll("last")
        self.check_outcomes(engine, sampled)

    def test_an_interrupt_while_pages_are_reserved_stops_the_engine(self) -> None:
        """Where it comes, they may be in nobody's hands: what was told is right, and nothing more is computed."""
        for k in range(9):
            with self.subTest(k=k):
                engine = make_engine(**TIGHT)
                self.submit(engine, FIVE)
                self.interrupt_once(engine, k)
                self.assertRaises(KeyboardInterrupt, engine.run)
                self.assertRaisesRegex(EngineError, "has stopped: KeyboardInterrupt.*make a new one", engine.step)
                for name, ask in FIVE.items():
                    told = outcome(engine.poll(name))
                    self.assertEqual(told, solo(ask, name)[0][:len(told)])
                engine.close()
                engine.kv.check()
                self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)

    def test_an_interrupt_within_the_page_manager_gives_nobody_wrong_tokens(self) -> None:
        """At the k-th line of the scheduler's and the page manager's code: the engine says that it has stopped. Or it
        goes on, since between two steps ``run`` asks whether there is work."""
        within, stopped = ("scheduler.py", "sequences.py", "kv_cache.py"), 0
        for k in range(0, 2500, 29):
            engine = make_engine(**TIGHT)
            self.submit(engine, FIVE)
            self.assertRaises(KeyboardInterrupt, self.interrupted_at, engine, k, within)
            try:
                engine.run()
                whole = True
            except EngineError as error:
                self.assertIn("has stopped: KeyboardInterrupt", str(error))
                whole = False
            for name, ask in FIVE.items():
                told = outcome(engine.poll(name))
                self.assertEqual(told, solo(ask, name)[0][:None if whole else len(told)], f"line {k}")
            engine.close()
            stopped += not whole
        self.assertGreater(stopped, 70)

    def test_an_interrupt_while_a_request_is_submitted_leaves_it_whole_or_out_or_stops_the_engine(self) -> None:
        within = ("engine.py", "core.py", "scheduler.py", "sequences.py", "timeline.py", "metrics.py")
        outcomes = Counter[str]()
        for max_tokens in (3, 0):
            submit = partial(InferenceEngine.submit, prompt_tokens=[1, 2, 3], max_tokens=max_tokens, request_id="r")
            for k in count():
                engine = make_engine(**TIGHT)
                engine.submit([1, 2], 2, request_id="earlier")
                with self.subTest(max_tokens=max_tokens, k=k):
                    try:
                        self.interrupted_at(engine, k, within, act=submit)
                    except KeyboardInterrupt:
                        outcomes[self.after_submit(engine)] += 1
                        continue
                self.assertEqual(self.after_submit(engine), "whole")
                break
        self.assertGreater(min(outcomes[ended] for ended in ("whole", "out", "stopped")), 3)

    def after_submit(self, engine: InferenceEngine) -> str:
        """What became of request r. Whatever it is, the engine can be looked at, and closed."""
        self.assertIn("active", repr(engine))
        try:
            engine.run()
            ended = "whole" if "r" in engine._core.streams else "out"
        except EngineError as error:
            self.assertIn("has stopped: KeyboardInterrupt", str(error))
            ended = "stopped"
        if ended == "whole":
            self.assertEqual(engine.poll("r")[-1].finish_reason, "length")
        engine.metrics()
        engine.close()
        engine.kv.check()
        self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)
        return ended

    def interrupted_at(self, engine: InferenceEngine, k: int, files: tuple[str, ...], *aside: str,
                       act: Callable[[InferenceEngine], object] = InferenceEngine.run) -> None:
        """Run it, with an interrupt at the k-th line of these files, functions ``aside`` not counted."""
        lines = count()

        def trace(frame: FrameType, event: str, argument: object) -> object:
            if not frame.f_code.co_filename.endswith(files) or frame.f_code.co_name in aside:
                return None
            if event == "line" and next(lines) == k:
                raise KeyboardInterrupt
            return trace

        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            act(engine)
        finally:
            sys.settrace(traced)

    def interrupt_once(self, engine: InferenceEngine, call: int) -> None:
        """The call-th reservation of a page that is granted is followed by an interrupt."""
        reserve, numbers = engine.kv.reserve, count()

        def interrupted(*arguments) -> None:
            reserve(*arguments)
            if next(numbers) == call:
                raise KeyboardInterrupt

        engine.kv.reserve = interrupted

    def test_an_interrupt_while_tokens_are_told_stops_the_engine(self) -> None:
        """Some streams have their tokens then and others do not: no token is wrong, and pages can be given back."""
        for kind, k in product(("token", "pages", "finish"), range(3)):
            with self.subTest(kind=kind, k=k):
                engine = make_engine(**TIGHT)
                self.submit(engine, FIVE)
                numbers = count()

                def listener(event, kind=kind, k=k, numbers=numbers, engine=engine):
                    told = engine.timeline.events[-1]["step"] == engine.steps and event["event"] == kind
                    if told and engine.steps and next(numbers) == k:
                        raise KeyboardInterrupt

                engine.timeline.listen(listener)
                with suppress(EngineError):  # it stops at once, or goes on to the right end
                    while engine.active:
                        with suppress(KeyboardInterrupt):
                            engine.run()
                for name, ask in FIVE.items():
                    tokens = outcome(engine.poll(name))
                    self.assertEqual(tokens, solo(ask, name)[0][:len(tokens)])
                if engine.active:
                    self.assertRaisesRegex(EngineError, "has stopped: KeyboardInterrupt.*make a new one", engine.step)
                    self.assertRaisesRegex(EngineError, "has stopped", engine.submit, [1], 1)
                engine.close()
                engine.kv.check()
                self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)

    def test_an_interrupt_anywhere_in_a_step_gives_nobody_wrong_tokens(self) -> None:
        """At the k-th line of the engine's own code: the step is done again, or the engine says that it has stopped.
        (Not tried within the page manager's changes, whose observer ``_on_pages`` is: there pages may be lost.)"""
        outcomes = Counter[str]()
        for k in range(0, 900, 7):
            engine = make_engine(**TIGHT)
            self.submit(engine, FIVE)
            self.assertRaises(KeyboardInterrupt, self.interrupted_at, engine, k,
                              ("engine.py", "core.py"), "_on_pages")
            ended = "interrupted"
            try:
                engine.run()
            except EngineError as error:
                self.assertIn("has stopped: KeyboardInterrupt", str(error))
                ended = "stopped"
            for name, ask in FIVE.items():
                told = outcome(engine.poll(name))
                self.assertEqual(told, solo(ask, name)[0][:None if ended == "interrupted" else len(told)], f"line {k}")
            outcomes[ended] += 1
            engine.close()
            self.assertEqual(engine.kv.free_pages, engine.kv.total_pages, f"line {k}")
        self.assertGreater(min(outcomes["interrupted"], outcomes["stopped"]), 20, outcomes)

    def test_an_interrupt_at_a_last_token_leaves_no_page(self) -> None:
        for n in (1, 2, 3):
            engine = make_engine(**TIGHT)
            last = solo(Ask((3, 1, 4), 6), "a")[0][2][0]
            engine.submit((3, 1, 4), 6, stop_tokens=[last], sampling=SamplingParams(n=n))

            def listener(event, last=last):
                if event["event"] == "token" and event["token"] == last:
                    raise KeyboardInterrupt

            engine.timeline.listen(listener)
            with self.assertRaises(KeyboardInterrupt), engine:
                engine.run()
            engine.kv.check()
            self.assertEqual(engine.kv.free_pages, engine.kv.total_pages)

    def test_an_interrupted_cancel_stops_the_engine(self) -> None:
        for kind in ("cancel", "pages", "finish"):
            engine = make_engine(**TIGHT)
            self.submit(engine, FIVE)
            engine.step()

            def listener(event, kind=kind):
                if event["event"] == kind:
                    raise KeyboardInterrupt

            engine.timeline.listen(listener)
            self.assertRaises(KeyboardInterrupt, engine.cancel, "a")
            self.assertRaisesRegex(EngineError, "has stopped", engine.step)

    def test_who_listens_may_cancel(self) -> None:
        """When it hears of a token, of a request with three samples; a neighbour is served."""
        for k in range(12):
            with self.subTest(k=k):
                engine, numbers = make_engine(**ROOMY), count()
                engine.submit((3, 1, 4), 6, request_id="three", sampling=SamplingParams(1.0, n=3))
                self.submit(engine, {"b": FIVE["b"]})

                def listener(event, k=k, numbers=numbers, engine=engine):
                    if event["event"] == "token" and event["request"] != "b" and next(numbers) == k:
                        engine.cancel("three")

                engine.timeline.listen(listener)
                engine.run()
                engine.poll("three")
                self.check_outcomes(engine, {"b": FIVE["b"]})

    def test_an_interrupt_while_a_request_is_told_loses_it_nowhere(self) -> None:
        engine = make_engine()

        def listener(event):
            if event["event"] == "submit" and event["request"] == "x":
                raise KeyboardInterrupt

        engine.timeline.listen(listener)
        self.assertRaises(KeyboardInterrupt, engine.submit, [1, 2], 3, request_id="x")
        self.submit(engine, FIVE)
        engine.run()
        self.assertEqual(outcome(engine.poll("x")), solo(Ask((1, 2), 3))[0])
        self.check_outcomes(engine, FIVE)
        self.assertEqual(engine.metrics(), Metrics.of(engine.timeline.events))

    def test_an_interrupt_while_a_request_is_told_wakes_the_engine_all_the_same(self) -> None:
        with make_engine() as engine:
            def listener(event: Event) -> None:
                if event["event"] == "submit":
                    raise KeyboardInterrupt

            engine.timeline.listen(listener)
            engine.start()
            while not engine._work._waiters:  # type: ignore[attr-defined]  # until its thread waits for work
                sleep(0.001)
            self.assertRaises(KeyboardInterrupt, engine.submit, [1, 2], 3, request_id="x")
            events: list[TokenEvent] = []
            reader = Thread(target=lambda: events.extend(engine.stream("x")), daemon=True)
            reader.start()
            reader.join(timeout=60)
            self.assertEqual(outcome(events), solo(Ask((1, 2), 3))[0])

    @needs_wing("observe")
    def test_who_listens_later_hears_of_a_token_before_its_cancel(self) -> None:
        engine, heard = make_engine(), []

        def cancel(event: Event) -> None:
            if event["event"] == "token" and event["request"] == "a" and event["index"] == 1:
                engine.cancel("b")
                engine.cancel("a")

        engine.timeline.listen(lambda event: heard.append(event))
        engine.timeline.listen(cancel)
        late: list[Event] = []
        engine.timeline.listen(late.append)
        for name in "abc":
            engine.submit([1, 2, 3], 6, request_id=name)
        engine.run()
        self.assertEqual(late, heard)
        self.assertEqual([event for event in engine.timeline.events if event["event"] != "header"], heard)
        told = [(event["event"], event["request"]) for event in heard if event["event"] in ("token", "cancel")]
        cancelled = told.index(("cancel", "b"))
        self.assertEqual(told[cancelled - 1:cancelled + 2], [("token", "a"), ("cancel", "b"), ("cancel", "a")])
        self.assertNotIn(("token", "a"), told[cancelled:])
        self.assertEqual(Audit.of(engine.timeline.events).violations, [])

    def test_a_timeline_listener_that_fails_loses_no_token(self) -> None:
        """A full disk, say: it is told once, after the step, and is let go."""
        for kind, k in product(("step", "pages", "token", "finish"), range(4)):
            with self.subTest(kind=kind, k=k):
                engine = make_engine(**TIGHT)
                self.submit(engine, FIVE)
                numbers, failures = count(), 0

                def listener(event, kind=kind, k=k, numbers=numbers):
                    if event["event"] == kind and next(numbers) == k:
                        raise OSError("disk full")

                engine.timeline.listen(listener)
                while engine.active:
                    try:
                        engine.run()
                    except OSError:
                        failures += 1
                self.check_outcomes(engine, FIVE)
                self.assertEqual(failures, 1)

    def test_pages_released_from_outside(self) -> None:
        """B16: an engine's own handle, after any number of steps: that request ends with an error."""
        for settings, name, k in product((TIGHT, {**ROOMY, "budget_tokens": 3}), FIVE, range(1, 8)):
            with self.subTest(settings=settings, name=name, k=k):
                engine = make_engine(**settings)
                self.submit(engine, FIVE)
                for _ in range(k):
                    engine.step()
                if not engine.scheduler.is_running(name):
                    continue
                engine.kv.release(engine.scheduler.handle(name))
                self.check_outcomes(engine, FIVE, failed=name)

    def test_pages_taken_from_outside_while_a_step_is_planned(self) -> None:
        """One request asks for a page, and somebody takes those of another, which has its chunk or is to have it."""
        asks = {"a": Ask((3, 1, 4, 1), 9), "b": Ask((5, 5), 9)}
        for taken, asking in (("a", "b"), ("b", "a")):
            for take, error in (("release", "StaleHandleError"), ("swap_out", f"RequestError: {taken} is swapped out")):
                with self.subTest(taken=taken, take=take):
                    engine = make_engine(page_size=4, num_pages=16, preemption="swap", host_pages=8)
                    self.submit(engine, asks)
                    engine.step()

                    def interfere(number: int, for_whom: str, engine=engine, taken=taken,
                                  asking=asking, take=take) -> None:
                        if for_whom == asking and engine.scheduler.is_running(taken):
                            handle = engine.scheduler.handle(taken)
                            if engine.kv.owns(handle) and handle.pages:
                                getattr(engine.kv, take)(handle)

                    engine.kv.before_take = interfere
                    self.check_outcomes(engine, asks, failed=taken)
                    errors = [event["error"] for event in engine.timeline if "error" in event]
                    self.assertEqual(len(errors), 1)
                    self.assertIn(error, errors[0])

    def test_a_page_manager_that_reserves_too_little(self) -> None:
        """Whoever lacks the page ends with a sentence that says so; the others do not notice."""
        for short in FIVE:
            engine = make_engine(**ROOMY)

            def reserve(handle: KVHandle, count: int, right=engine.kv.reserve, short=short) -> None:
                if handle.request_id != short:
                    right(handle, count)

            engine.kv.reserve = reserve  # type: ignore[method-assign]
            self.submit(engine, FIVE)
            engine.run()
            events = engine.poll(short)
            if len(FIVE[short].prompt) + FIVE[short].max_tokens - 1 <= 4 * -(-len(FIVE[short].prompt) // 4):
                self.check_ask(events, short, FIVE[short], False)  # the pages of its prompt were enough
            else:
                self.assertRegex(str(events[-1].error), f"{short} is to compute position [48], and its [12] pages of 4")
            self.check_outcomes(engine, {name: ask for name, ask in FIVE.items() if name != short})

    def test_pages_released_while_the_decoder_computes(self) -> None:
        for k in range(6):
            engine = make_engine(backend := FaultyBackend(), **ROOMY)
            self.submit(engine, FIVE)
            for _ in range(k):
                engine.step()

            def release(moment: str, tokens: Sequence[int], engine=engine, backend=backend) -> None:
                backend.fault = lambda moment, tokens: None
                engine.kv.release(engine.scheduler.handle("a"))

            backend.fault = release
            engine.step()
            self.assertRegex(engine.poll("a")[-1].error, "StaleHandleError")
            self.check_outcomes(engine, {name: ask for name, ask in FIVE.items() if name != "a"})

    def test_pages_held_outside_for_ever_end_a_request_with_an_error(self) -> None:
        engine = make_engine(page_size=2, num_pages=4)
        outside = engine.kv.allocate("outside", 6)
        small = Ask((4,), 2)
        self.submit(engine, {"big": Ask((1, 2, 3), 4, SamplingParams(n=3)), "small": small})
        events = list(engine.stream("big"))
        for number in range(3):
            self.check_events(events, ("error",), number)
        self.assertRegex(events[-1].error, "OutOfPagesError")
        self.assertLessEqual(engine.steps, 2 + REFUSAL_LIMIT)
        engine.kv.release(outside)
        self.check_outcomes(engine, {"small": small})

    def test_a_table_forked_from_outside_is_only_read(self) -> None:
        """The engine's request goes on, and the fork keeps what it had."""
        for k in range(1, 8):
            with self.subTest(k=k):
                engine = make_engine(page_size=4, num_pages=32, budget_tokens=3)
                self.submit(engine, {"c": FIVE["c"]})
                for _ in range(k):
                    engine.step()
                if not engine.active:
                    continue
                fork = engine.kv.fork(engine.scheduler.handle("c"), "outside")
                stored = [engine.kv.read(fork, i) for i in range(engine.kv.length(fork))]
                engine.step()
                engine.kv.check()
                engine.kv.append(fork, [7.0] * engine.kv.width, [7.0] * engine.kv.width)
                engine.run()
                self.assertEqual([engine.kv.read(fork, i) for i in range(len(stored))], stored)
                engine.kv.release(fork)
                self.check_outcomes(engine, {"c": FIVE["c"]})


if __name__ == "__main__":
    unittest.main()
