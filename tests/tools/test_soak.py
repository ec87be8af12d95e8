"""scripts/soak.py, small: counts are bounded, and it notices each of several leaks. Nothing is timed."""

from __future__ import annotations

import gc
import io
import sys
import unittest
from unittest.mock import patch

from scripts import soak
from scripts.soak import IN_FLIGHT, MIB, SCENARIO, SHARES, Reading, Soak, verdict
from starter.base.console import Console
from starter.base.statistics import Percentiles
from starter.core import EngineCore
from starter.streams import RequestStream
from starter.timeline import Timeline
from tests.support import run_main

KEEP, UNREAD = 300, 40
LIVE = IN_FLIGHT + SCENARIO["engine"]["max_waiting"] + 2 * SCENARIO["engine"]["max_running"]


def small_soak(requests: int = 2_000) -> Soak:
    """With bounds that are reached in the first fifth."""
    with patch.object(Percentiles, "EXACT", 100):
        small = Soak(requests, keep_events=KEEP, max_unread=UNREAD)
        with small.engine:
            small.run()
    return small


def more_objects(small: Soak) -> float:
    """For each request after the first fifth."""
    early, late = small.readings[1], small.readings[-1]
    return (late.objects - early.objects) / (late.requests - early.requests)


class SoakTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        small_soak()  # fills the caches of the process, such as that of rotary angles

    def test_what_is_kept_is_bounded_whatever_the_clients_leave_behind(self) -> None:
        streams = sum(type(one) is RequestStream for one in gc.get_objects())
        small = small_soak()
        self.assertEqual([reading.requests for reading in small.readings], list(range(200, 2_001, 200)))
        for reading in small.readings:
            self.assertEqual((reading.events, reading.past), (KEEP, UNREAD))
            self.assertLessEqual(reading.streams, UNREAD + LIVE)
        self.assertLess(more_objects(small), 0.5)
        core, metrics = small.engine._core, small.engine.metrics()
        self.assertEqual((len(core.samples), len(core.metrics.requests), len(core.unread)), (0, 0, UNREAD))
        gc.collect()
        now = sum(type(one) is RequestStream for one in gc.get_objects())
        self.assertLessEqual(now - streams, UNREAD + LIVE)
        self.assertEqual(small.ways.keys(), {*SHARES, "queue full"})
        self.assertEqual(sum(small.ways.values()), 2_000)
        self.assertEqual((metrics.submitted + metrics.refused, sum(metrics.finished.values())),
                         (2_000, metrics.submitted))
        self.assertEqual(sum(small.heard.values()), small.engine.timeline.recorded - 1)  # all but the header
        self.assertGreater(min(metrics.preemptions, metrics.finished["cancelled"], metrics.finished["stop"],
                               metrics.found_tokens, small.heard["fork"]), 0)

    def assert_grows(self) -> None:
        self.assertGreater(more_objects(small_soak()), 1.0)

    def test_streams_that_are_never_forgotten(self) -> None:
        with patch.object(EngineCore, "_keep_unread", lambda core, stream: None):
            self.assert_grows()

    def test_samples_that_are_kept_for_ever(self) -> None:
        with patch.object(Percentiles, "add", lambda percentiles, sample: percentiles._samples.append(sample + 0.5)):
            self.assert_grows()

    def test_events_that_are_kept_for_ever(self) -> None:
        append, kept = Timeline.append, []
        with patch.object(Timeline, "append", lambda timeline, event: (kept.append(event), append(timeline, event))):
            self.assert_grows()


class VerdictTest(unittest.TestCase):
    def said(self, early: tuple[int, int], late: tuple[int, int]) -> tuple[int, str]:
        """``early`` and ``late``: MiB and objects after a fifth and at the end."""
        finished, out = Soak(10), io.StringIO()
        for memory, objects in ((1, 1), early, *[(99, 9_999)] * 7, late):
            finished.readings.append(Reading(1, memory * MIB, objects, 0, 0, 0, 0, 0, 0.0))
        return verdict(finished, 4.0, Console(out)), out.getvalue()

    def test_by_hand(self) -> None:
        self.assertEqual(self.said((40, 1_000), (44, 1_020)),
                         (0, "After the first fifth, memory grew by 4.0 MiB (allowed: 4) and objects by 2.0% "
                             "(allowed: 2%): bounded.\n"))
        self.assertEqual(self.said((40, 1_000), (45, 1_000))[0], 1)
        code, text = self.said((40, 1_000), (39, 1_030))
        self.assertEqual((code, "memory grew by -1.0 MiB" in text, "it GROWS" in text), (1, True, True))


class ProgramTest(unittest.TestCase):
    def test_a_line_for_each_tenth(self) -> None:
        with patch.object(soak, "LEAST", 100):
            ran = run_main(soak.main, "--requests", 200, "--margin", 1_000)
        head, *lines, last = ran.out.splitlines()
        self.assertEqual((head, len(lines), ran.err), (soak.HEAD, 10, ""))
        self.assertEqual([line.split()[0] for line in lines], [f"{requests}" for requests in range(20, 201, 20)])
        self.assertIn("(allowed: 1000)", last)
        self.assertEqual(ran.code, int("it GROWS" in last))  # so few may not fill what is bounded: see VerdictTest

    def test_bad_input(self) -> None:
        for arguments, problem in ((("--requests", 5), "--requests must be at least 50000, not 5"),
                                   (("--backend", "abacus"), "there is no backend 'abacus'")):
            ran = run_main(soak.main, *arguments)
            self.assertEqual((ran.code, ran.out, ran.err.count("\n")), (2, "", 1))
            self.assertIn(problem, ran.err)

    def test_help(self) -> None:
        self.assertEqual(run_main(soak.main, "--help").code, 0)

    def test_resident_memory(self) -> None:
        before = soak.resident_bytes()
        block = b"x" * (64 * MIB)
        after = soak.resident_bytes()
        self.assertGreater(before, MIB)
        self.assertGreater(after - before, 48 * MIB if sys.platform in ("linux", "win32") else -1, len(block))


if __name__ == "__main__":
    unittest.main()
