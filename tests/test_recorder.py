"""The recorder stamps events, keeps cause before effect, and survives listeners that fail."""

from __future__ import annotations

import unittest

from starter.kv_cache import KVCacheManager
from starter.metrics import MetricsCollector
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import Request, TokenEvent
from starter.timeline import Recorder, VirtualClock


class RecorderTest(unittest.TestCase):
    def setUp(self) -> None:
        self.collector = MetricsCollector()
        self.recorder = Recorder(VirtualClock(0.5), self.collector)
        self.recorder.header(page_bytes=64, weight_bytes=10)

    def kinds(self) -> list[str]:
        return [event["event"] for event in self.recorder.timeline]

    def test_events_carry_completed_steps_and_the_clocks_time(self) -> None:
        self.recorder.event("submit", request="r", prompt_tokens=[1], max_tokens=2)
        self.recorder.step_completed()
        self.recorder.event("token", request="r", index=0, token=3, text="c")
        stamps = [(event["step"], event["time"]) for event in self.recorder.timeline]
        self.assertEqual(stamps, [(0, 0.0), (0, 0.0), (1, 0.5)])
        self.assertEqual(self.collector.snapshot().ttft.mean, 0.5)

    def test_page_changes_follow_the_step_that_planned_them_and_precede_what_comes_after(self) -> None:
        kv = KVCacheManager(4, 2, observer=lambda change, request_id, pages: self.recorder.event(
            "pages", change=change, request=request_id, pages=list(pages), used_pages=kv.used_pages))
        scheduler = ContinuousBatchScheduler(kv=kv)
        request = Request("r", (1, 2, 3), 1)
        scheduler.submit(request)
        self.recorder.submitted(request)
        with self.recorder.holding_back():
            decision = scheduler.step(8)
            self.recorder.planned(decision, decision.scheduled_tokens, kv)
        scheduler.finish("r", "stop")
        self.recorder.event("note")
        self.assertEqual(self.kinds(), ["header", "submit", "step", "pages", "pages", "note"])
        step, allocate, release = list(self.recorder.timeline)[2:5]
        self.assertEqual((step["chunks"], step["used_pages"], step["empty_slots"]), ([["r", 0, 3, "prefill"]], 2, 4))
        self.assertEqual((allocate["change"], allocate["pages"], allocate["used_pages"]), ("allocate", [0, 1], 2))
        self.assertEqual((release["change"], release["used_pages"]), ("release", 0))

    def test_a_plan_that_fails_still_tells_what_it_has_changed(self) -> None:
        with self.assertRaises(OSError), self.recorder.holding_back():
            self.recorder.event("pages", change="allocate", request="r", pages=[1, 2], used_pages=2)
            self.assertEqual(self.kinds(), ["header"])
            raise OSError
        self.recorder.event("note")
        self.assertEqual(self.kinds(), ["header", "pages", "note"])

    def test_a_step_is_abandoned_once_and_only_if_its_plan_was_told_and_it_was_not_completed(self) -> None:
        def plan() -> None:
            with self.recorder.holding_back():
                self.recorder.planned(ContinuousBatchScheduler().step(8), 0, KVCacheManager(4, 2))

        self.recorder.abandoned()
        plan()
        self.recorder.step_completed()
        self.recorder.abandoned()
        self.assertEqual(self.kinds(), ["header", "step"])
        plan()
        self.recorder.abandoned()
        self.recorder.abandoned()
        self.assertEqual(self.recorder.timeline.events[-1], {"event": "abandon", "step": 1, "time": 0.5})
        self.assertEqual(self.kinds(), ["header", "step", "step", "abandon"])
        self.assertEqual((self.recorder.steps, self.collector.snapshot().steps), (1, 1))

    def test_outside_a_plan_everything_is_told_at_once(self) -> None:
        self.recorder.event("pages", change="release", request="r", pages=[1], used_pages=0)
        self.assertEqual(list(self.recorder.timeline)[1:], [
            {"event": "pages", "step": 0, "time": 0.0, "change": "release", "request": "r", "pages": [1],
             "used_pages": 0}])

    def test_who_listens_finds_the_event_in_the_metrics(self) -> None:
        found = []
        self.recorder.timeline.listen(lambda event: found.append(self.collector.snapshot().submitted))
        self.recorder.event("submit", request="r", prompt_tokens=[1], max_tokens=2)
        self.assertEqual(found, [1])

    def test_tokens_are_told_together_before_what_comes_next(self) -> None:
        clock = iter(range(100))
        self.recorder = Recorder(lambda: float(next(clock)), self.collector)
        for name in "ab":
            self.recorder.event("submit", request=name, prompt_tokens=[1], max_tokens=2)
        self.recorder.step_completed()
        for name in "ab":
            self.recorder.token(name, TokenEvent(name, 0, 5, "x", 0, self.recorder.now))
        self.assertEqual((self.kinds(), self.collector.snapshot().output_tokens), (["submit", "submit"], 0))
        self.recorder.event("finish", request="a", reason="stop", tokens=1)
        self.recorder.write_tokens()  # there are none left
        self.assertEqual(self.kinds(), ["submit", "submit", "token", "token", "finish"])
        times = [event["time"] for event in self.recorder.timeline]
        self.assertEqual((times, times[2]), (sorted(times), times[3]))
        self.assertEqual(self.collector.snapshot().output_tokens, 2)
        self.assertEqual(self.collector.snapshot().elapsed_seconds, times[-1] - times[0])

    def test_a_listener_that_fails_is_let_go_and_its_error_told_later(self) -> None:
        heard = []

        def full(event: object) -> None:
            raise OSError("disk full")

        self.recorder.timeline.listen(full)
        self.recorder.timeline.listen(heard.append)
        self.recorder.event("one")
        self.recorder.event("two")
        self.assertEqual(len(heard), 2)
        self.assertRaisesRegex(OSError, "disk full", self.recorder.raise_trouble)
        self.recorder.raise_trouble()  # told once


if __name__ == "__main__":
    unittest.main()
