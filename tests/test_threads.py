"""One engine, many threads: what may wait for whom, and what nobody may notice."""

from __future__ import annotations

import random
import threading
import unittest
from collections.abc import Callable
from threading import Event, Thread

from starter.errors import CapacityError, EngineError, QueueFullError
from starter.scheduler import ContinuousBatchScheduler
from tests.support import CONTEXT, FIVE, Ask, FaultyBackend, make_engine, outcome, prompt_of, solo

PATIENCE = 30.0  # seconds until a test that hangs fails


class ThreadsCase(unittest.TestCase):
    def in_threads(self, number: int, work) -> None:
        """Run work(i) in threads of their own and raise the first thing that went wrong."""
        problems: list[BaseException] = []

        def guarded(i: int) -> None:
            try:
                work(i)
            except BaseException as problem:
                problems.append(problem)

        threads = [Thread(target=guarded, args=(i,), daemon=True) for i in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        self.assertFalse(any(thread.is_alive() for thread in threads), "a thread hangs")
        if problems:
            raise problems[0]


class Served(ThreadsCase):
    def test_32_threads_and_random_cancels(self) -> None:
        """K118: each stream is that of its request alone, or a beginning of it where it was cancelled."""
        for started in (True, False):
            with self.subTest(started=started), make_engine(page_size=3, num_pages=30, max_running=6) as engine:
                if started:
                    engine.start()

                def client(i: int) -> None:
                    dice = random.Random(i)
                    ask = Ask(prompt_of(dice, dice.randint(1, 9)), dice.randint(1, 12))
                    cancel_after = dice.choice([None, None, 1, 3])
                    ask.submit(engine, f"t{i}")
                    events = []
                    for event in engine.stream(f"t{i}"):
                        events.append(event)
                        if len(events) == cancel_after and not event.finish_reason:
                            engine.cancel(f"t{i}")
                    (alone,) = solo(ask)
                    reasons = [event.finish_reason for event in events]
                    self.assertEqual([event.index for event in events], list(range(len(events))))
                    self.assertEqual(reasons[:-1], [None] * (len(reasons) - 1))
                    expected = alone if reasons[-1] == "length" else alone[:cancel_after]
                    self.assertEqual(outcome(events), expected)
                    self.assertIn(reasons[-1], ("length", "cancelled"))

                self.in_threads(32, client)
                engine.kv.check()
                self.assertEqual((engine.active, engine.kv.free_pages), ((), 30))

    def test_two_readers_of_one_stream_share_its_events(self) -> None:
        with make_engine() as engine:
            engine.start()
            Ask((1, 2), 12).submit(engine, "r")
            seen: list[int] = []
            streams = [engine.stream("r"), engine.stream("r")]
            self.in_threads(2, lambda i: seen.extend(event.index for event in streams[i]))
            self.assertEqual(sorted(seen), list(range(12)))

    def test_the_thread_ends_with_the_engine(self) -> None:
        before = threading.active_count()
        engine = make_engine()
        engine.start()
        engine.start()  # idempotent
        self.assertEqual(threading.active_count(), before + 1)
        FIVE["a"].submit(engine, "a")
        self.assertEqual(outcome(engine.stream("a")), solo(FIVE["a"])[0])
        engine.close()
        engine.close()
        self.assertEqual(threading.active_count(), before)
        self.assertRaises(EngineError, engine.start)


def watched(table: dict, held: Callable[[], bool]) -> dict:
    """The table, with an assertion before every look at it: the thread that looks holds the lock."""
    def method(name: str) -> Callable[..., object]:
        def checked(self: dict, *arguments: object) -> object:
            assert held(), f"{name} without the lock"
            return getattr(dict, name)(self, *arguments)

        return checked

    names = ("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "get", "values",
             "update")
    return type("Watched", (dict,), {name: method(name) for name in names})(table)


class Locked(unittest.TestCase):
    def test_every_method_holds_the_lock_while_it_looks_at_requests(self) -> None:
        """Of the engine's tables of requests, and with them of all that hangs on an entry."""
        engine = make_engine()
        engine._core.streams = watched(engine._core.streams, engine._work._is_owned)
        engine._core.samples = watched(engine._core.samples, engine._work._is_owned)
        with self.assertRaisesRegex(AssertionError, "get without the lock"):
            engine._core.streams.get("r")
        Ask((1, 2), 4).submit(engine, "r")
        engine.step()
        self.assertEqual((engine.active, engine.status("r").state, len(engine.poll("r"))), (("r",), "running", 1))
        self.assertEqual(len(list(engine.stream("r"))), 3)
        with self.assertRaises(CapacityError):
            engine.generate([[1], [2] * CONTEXT], 4)  # the second is refused, the first is cancelled and read
        Ask((1, 2), 4).submit(engine, "cancelled")
        engine.cancel("cancelled")
        Ask((1, 2), 4).submit(engine, "closed")
        engine.run()
        engine.metrics()
        repr(engine)
        engine.close()


class Blocked(ThreadsCase):
    """A decoder that computes until it is told to go on."""

    def setUp(self) -> None:
        self.computing, self.go_on = Event(), Event()

        def wait(moment: str, tokens: object) -> None:
            if moment == "start":
                self.computing.set()
                self.assertTrue(self.go_on.wait(PATIENCE))

        self.engine = make_engine(FaultyBackend(wait))
        self.engine.start()
        Ask((1, 2), 5).submit(self.engine, "slow")
        self.assertTrue(self.computing.wait(PATIENCE))

    def tearDown(self) -> None:
        self.go_on.set()
        self.engine.close()

    def test_submit_cancel_and_status_do_not_wait_for_the_decoder(self) -> None:
        def others(_: int) -> None:
            Ask((3,), 4).submit(self.engine, "other")
            self.engine.cancel("other")
            (event,) = self.engine.poll("other")
            self.assertEqual(event.finish_reason, "cancelled")
            self.assertEqual(self.engine.status("slow").state, "running")
            self.engine.cancel("slow")
            self.assertEqual(self.engine.kv.free_pages, self.engine.kv.total_pages)

        self.in_threads(1, others)

    def test_an_id_used_again_while_its_old_tokens_are_computed(self) -> None:
        """K044: what the decoder is computing belongs to the request that was cancelled."""
        self.engine.cancel("slow")
        Ask((7, 7), 4).submit(self.engine, "slow")
        self.go_on.set()
        self.assertEqual(outcome(self.engine.stream("slow")), solo(Ask((7, 7), 4))[0])

    def test_close_wakes_a_waiting_reader(self) -> None:
        reader = self.engine.stream("slow")
        events = []
        thread = Thread(target=lambda: events.extend(reader), daemon=True)
        thread.start()
        closer = Thread(target=self.engine.close, daemon=True)
        closer.start()
        thread.join(PATIENCE)  # the reader does not wait for the decoder either
        self.assertEqual([event.finish_reason for event in events], ["cancelled"])
        self.go_on.set()
        closer.join(PATIENCE)
        self.assertFalse(closer.is_alive())


class Closed(ThreadsCase):
    def test_between_a_readers_look_and_its_step(self) -> None:
        """A reader finds no news and is about to run a step when another thread closes the engine."""
        class Closing:
            """In place of the lock: the engine is closed when the step enters it, after the reader has."""
            entered = 0

            def acquire(self, blocking: bool = True) -> bool:
                self.entered += 1
                if self.entered == 2:
                    engine.close()
                return True

            def release(self) -> None:
                pass

            def __enter__(self) -> None:
                self.acquire()

            def __exit__(self, *exception: object) -> None:
                self.release()

        engine = make_engine()
        Ask((1, 2), 5).submit(engine, "r")
        reader = engine.stream("r")
        engine.stepping = Closing()
        self.assertEqual([(event.token, event.finish_reason) for event in reader], [(None, "cancelled")])
        self.assertRaisesRegex(EngineError, "closed", engine.step)

    def test_while_eight_readers_run_the_steps(self) -> None:
        """Without a thread of the engine's own: each reader gets its last event, whoever is computing."""
        computing, go_on = Event(), Event()

        def wait(moment: str, tokens: object) -> None:
            computing.set()
            self.assertTrue(go_on.wait(PATIENCE))

        engine = make_engine(FaultyBackend(wait))
        for i in range(8):
            Ask((i,), 20).submit(engine, f"r{i}")
        readers = [engine.stream(f"r{i}") for i in range(8)]

        def work(i: int) -> None:
            if i == 8:
                self.assertTrue(computing.wait(PATIENCE))
                engine.close()
                go_on.set()
            else:
                self.assertEqual([event.finish_reason for event in readers[i]], ["cancelled"])

        self.in_threads(9, work)
        self.assertEqual((engine.active, engine.kv.free_pages), ((), engine.kv.total_pages))


class Bounds(ThreadsCase):
    def test_a_full_queue_refuses_and_says_what_to_do(self) -> None:
        engine = make_engine(max_waiting=2, max_running=1)
        for name in "ab":
            Ask((1,), 3).submit(engine, name)
        with self.assertRaisesRegex(QueueFullError, "2 requests wait, and max_waiting is 2; try again"):
            Ask((1,), 3).submit(engine, "c")
        engine.step()  # a runs, so one place is free
        Ask((1,), 3).submit(engine, "c")
        self.assertEqual(engine.active, ("a", "b", "c"))

    def test_a_thread_that_dies_tells_its_readers(self) -> None:
        engine = make_engine()

        def broken(self: ContinuousBatchScheduler, budget_tokens: int) -> None:
            raise ZeroDivisionError("a bug")

        engine.scheduler.step = broken.__get__(engine.scheduler)  # type: ignore[method-assign]
        Ask((1,), 3).submit(engine, "r")
        engine.start()
        with self.assertRaisesRegex(EngineError, "engine has stopped: ZeroDivisionError"):
            next(engine.stream("r"))
        engine.close()

    def test_a_reader_that_never_comes_costs_its_tokens_and_no_more(self) -> None:
        with make_engine(num_pages=64) as engine:
            Ask((1,), 30).submit(engine, "unread")
            for i in range(20):
                Ask((2, 3), 5).submit(engine, f"r{i}")
                self.assertEqual(outcome(engine.stream(f"r{i}")), solo(Ask((2, 3), 5))[0])
            engine.run()
            self.assertEqual(len(engine.poll("unread")), 30)
            self.assertLess(30, CONTEXT)


if __name__ == "__main__":
    unittest.main()
