"""The account of a device's memory: refused before it is allocated, counted until it is gone."""

from __future__ import annotations

import gc
import threading
import unittest

from starter.backends.cuda.memory import DeviceMemory
from starter.errors import BackendError


class Array:
    """Something that was allocated."""


class DeviceMemoryTest(unittest.TestCase):
    def setUp(self) -> None:
        self.memory = DeviceMemory("cuda:0", free=1000)

    def test_a_plan_may_take_nine_tenths_of_what_is_free_and_not_a_byte_more(self) -> None:
        self.memory.plan({"K/V pages": 800, "scratch": 100})
        self.assertEqual(self.memory.planned, 900)
        with self.assertRaises(BackendError) as caught:
            self.memory.plan({"K/V pages": 801, "scratch": 100})
        self.assertIn("already held 0 + K/V pages 801 + scratch 100 = 901 bytes, but cuda:0 may use 900: 0.9 of the "
                      "1,000 that were free", str(caught.exception))
        self.assertEqual(self.memory.planned, 900)

    def test_what_is_held_counts_in_the_plan(self) -> None:
        held = self.memory.allocate(300, Array)
        self.memory.plan({"K/V pages": 600})
        with self.assertRaisesRegex(BackendError, r"already held 300 \+ K/V pages 601 = 901 bytes"):
            self.memory.plan({"K/V pages": 601})
        self.assertIsInstance(held, Array)

    def test_live_and_peak_follow_the_arrays(self) -> None:
        first, second = self.memory.allocate(500, Array), self.memory.allocate(400, Array)
        self.assertEqual((self.memory.live, self.memory.peak), (900, 900))
        del second
        gc.collect()
        self.assertEqual((self.memory.live, self.memory.peak), (500, 900))
        del first
        gc.collect()
        self.assertEqual((self.memory.live, self.memory.peak), (0, 900))

    def test_beyond_the_limit_nothing_is_allocated(self) -> None:
        calls: list[int] = []
        held = self.memory.allocate(900, Array)
        with self.assertRaisesRegex(BackendError, "out of memory: 1 bytes more than the 900 already held are beyond"):
            self.memory.allocate(1, lambda: calls.append(1))
        self.assertEqual((calls, self.memory.live, self.memory.peak), ([], 900, 900))
        self.assertIsInstance(held, Array)

    def test_a_device_that_fails_is_reported_and_nothing_is_counted(self) -> None:
        for failure in (RuntimeError("Failed to allocate 100 bytes"), MemoryError("none left")):
            def make(failure: Exception = failure) -> Array:
                raise failure
            with self.subTest(failure=failure), self.assertRaisesRegex(BackendError, f"did not give.*{failure}"):
                self.memory.allocate(100, make)
            self.assertEqual((self.memory.live, self.memory.peak), (0, 0))

    def test_an_array_may_end_while_memory_is_counted(self) -> None:
        """Garbage is collected at any moment, in the thread that holds the lock, too."""
        held = [self.memory.allocate(500, Array)]

        def collected_inside() -> None:
            with self.memory._lock:
                held.clear()

        thread = threading.Thread(target=collected_inside, daemon=True)
        thread.start()
        thread.join(10)
        self.assertEqual((thread.is_alive(), self.memory.live), (False, 0))

    def test_where_nothing_is_known_nothing_is_refused(self) -> None:
        memory = DeviceMemory("cpu", free=None)
        memory.plan({"K/V pages": 10**15})
        self.assertEqual(memory.planned, 10**15)

    def test_an_amount_that_is_none(self) -> None:
        for free in (0, -1, 1.5, True, "8 GB"):
            with self.subTest(free=free), self.assertRaisesRegex(BackendError, "free memory is a number of bytes"):
                DeviceMemory("cpu", free)  # type: ignore[arg-type]


if __name__ == "__main__":
    unittest.main()
