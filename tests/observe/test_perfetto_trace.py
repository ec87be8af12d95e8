"""Chrome traces: they follow the format's rules, and show what the timeline says, on the right track and in time."""

from __future__ import annotations

import json
import tempfile
import unittest
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from starter.errors import SchemaError
from starter.observe.perfetto import chrome_trace, write_chrome_trace
from starter.observe.timeline_file import read_timeline
from starter.timeline import Event
from tests.paths import TIMELINE
from tests.timelines import full_engine, random_run

NEEDED = {"X": {"dur", "args"}, "C": {"args"}, "M": {"args"}, "i": {"s", "args"}}
SECOND = 1_000_000
HEADER: Event = {"event": "header", "step": 0, "time": 0.0, "num_pages": 4}


def step(number: int, chunks: dict[str, tuple[int, int, str]], **fields: Any) -> Event:
    """A step's event; ``chunks`` by request: start, count, phase."""
    return {"event": "step", "step": number, "time": float(number), "budget": 8, "preempted": [], "admitted": [],
            "waiting": [], "running": [], "reasons": {name: f"because of {name}" for name in chunks},
            "chunks": [[name, *chunk] for name, chunk in chunks.items()], **fields}


def submit(name: str, number: int = 0) -> Event:
    return {"event": "submit", "step": number, "time": float(number), "request": name, "prompt_tokens": [1],
            "max_tokens": 2}


class FormatCase(unittest.TestCase):
    def check_format(self, trace: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
        """The rules of the format, written down once more; returns the slices of each thread."""
        slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        named = set()
        for event in trace:
            self.assertEqual(set(event), {"ph", "pid", "tid", "ts", "name"} | NEEDED[event["ph"]])
            for key in ("pid", "tid", "ts", *(["dur"] if event["ph"] == "X" else [])):
                self.assertIs(type(event[key]), int)
                self.assertGreaterEqual(event[key], 0)
            self.assertTrue(isinstance(event["name"], str) and event["name"])
            self.assertIsInstance(event["args"], dict)
            if event["ph"] == "X":
                slices[event["pid"], event["tid"]].append(event)
            elif event["ph"] == "C":
                self.assertTrue(event["args"] and all(type(value) is int for value in event["args"].values()))
            elif event["ph"] == "i":
                self.assertIn(event["s"], ("g", "p", "t"))
            elif event["name"] in ("process_name", "thread_name"):
                self.assertEqual([type(value) for value in event["args"].values()], [str])
                named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
            else:
                self.assertEqual((event["name"], list(event["args"])), ("thread_sort_index", ["sort_index"]))
        for (process, thread), track in slices.items():
            self.assertLessEqual({(process, None), (process, thread)}, named)
            track.sort(key=lambda one: one["ts"])
            for one, other in pairwise(track):  # none overlaps another
                self.assertLessEqual(one["ts"] + one["dur"], other["ts"])
        json.loads(json.dumps(trace, allow_nan=False))
        return slices

    def tracks(self, events: list[Event]) -> dict[str, list[tuple[str, int, int]]]:
        """By the name of the thread, its slices: name, start, duration. A name that comes twice is one here."""
        trace = chrome_trace(events)
        names = {(event["pid"], event["tid"]): event["args"]["name"] for event in trace
                 if event["name"] == "thread_name"}
        tracks: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for thread, track in self.check_format(trace).items():
            tracks[names[thread]] += [(one["name"], one["ts"], one["dur"]) for one in track]
        return tracks


class WrittenTest(FormatCase):
    """Events written by hand."""

    def test_a_request_waits_is_prefilled_decodes_and_is_preempted(self) -> None:
        tracks = self.tracks([
            HEADER, submit("a"), submit("b"), step(0, {"a": (0, 3, "prefill")}), step(1, {"a": (3, 1, "decode")}),
            step(2, {"b": (0, 1, "prefill")}, preempted=["a"]), step(3, {"b": (1, 1, "decode")}),
            step(4, {"a": (0, 4, "prefill")}),
            {"event": "finish", "step": 5, "time": 5.0, "request": "a", "reason": "length", "tokens": 2}])
        self.assertEqual(tracks, {
            "steps": [(f"step {i}", i * SECOND, SECOND) for i in range(5)],
            "a": [("prefill 0..2", 0, SECOND), ("decode 3", SECOND, SECOND), ("preempted", 2 * SECOND, 2 * SECOND),
                  ("prefill 0..3", 4 * SECOND, SECOND)],
            "b": [("waiting", 0, 2 * SECOND), ("prefill 0", 2 * SECOND, SECOND), ("decode 1", 3 * SECOND, SECOND)]})

    def test_reasons_instants_and_counters(self) -> None:
        trace = chrome_trace([
            HEADER, submit("a"), step(0, {"a": (0, 3, "prefill")}, running=["a"], waiting=["b", "c"], admitted=["a"]),
            {"event": "pages", "step": 0, "time": 0.0, "used_pages": 3},
            {"event": "fork", "step": 1, "time": 1.0, "request": "a#1", "parent": "a"},
            {"event": "token", "step": 1, "time": 1.0, "request": "a", "index": 0, "token": 7, "text": "\ud800"},
            {"event": "fault", "step": 1, "time": 1.0, "kind": "MemoryCut", "fault": {"pages": 3}},
            {"event": "cancel", "step": 1, "time": 1.0, "request": "a"},
            {"event": "finish", "step": 1, "time": 1.0, "request": "a", "reason": "error", "tokens": 1, "error": "no"}])
        self.check_format(trace)
        [chunk] = [event for event in trace if event["name"] == "prefill 0..2"]
        self.assertEqual(chunk["args"], {"reason": "because of a"})
        [one] = [event for event in trace if event["name"] == "step 0"]
        self.assertEqual(one["args"], {"scheduled": 3, "budget": 8, "admitted": ["a"], "preempted": []})
        self.assertEqual({event["name"]: event["args"] for event in trace if event["ph"] == "C"},
                         {"budget": {"used": 3, "left": 5}, "requests": {"running": 1, "waiting": 2},
                          "pages": {"used": 3, "free": 1}})
        instants = {event["name"]: (event["ts"], event["s"], event["args"]) for event in trace if event["ph"] == "i"}
        self.assertEqual(instants, {
            "sample of a": (SECOND, "t", {}), "token 0": (SECOND, "t", {"token": 7, "text": "\ud800"}),
            "fault: MemoryCut": (SECOND, "g", {"pages": 3}), "cancel": (SECOND, "t", {}),
            "finish: error": (SECOND, "t", {"tokens": 1, "error": "no"})})

    def test_times_are_microseconds_from_the_header_on(self) -> None:
        late = [{**HEADER, "time": 1000.5}, {**submit("a"), "time": 1000.75},
                {**step(0, {"a": (0, 1, "prefill")}), "time": 1001.0},
                {"event": "finish", "step": 1, "time": 1001.000002, "request": "a", "reason": "stop", "tokens": 0}]
        self.assertEqual(self.tracks(late), {"a": [("waiting", 250_000, 250_000), ("prefill 0", 500_000, 2)],
                                             "steps": [("step 0", 500_000, 2)]})

    def test_a_request_that_ends_within_a_step_leaves_its_track(self) -> None:
        tracks = self.tracks([HEADER, submit("a"), step(0, {"a": (0, 1, "prefill")}),
                              {"event": "finish", "step": 0, "time": 0.25, "request": "a", "reason": "cancelled"},
                              {**submit("a"), "time": 0.5}, {**step(1, {}), "time": 1.0}])
        self.assertEqual(tracks["a"], [("prefill 0", 0, SECOND // 4), ("waiting", SECOND // 2, SECOND // 2)])

    def test_a_step_that_was_interrupted(self) -> None:
        tracks = self.tracks([HEADER, submit("a"), step(0, {"a": (0, 1, "prefill")}),
                              {"event": "abandon", "step": 0, "time": 0.25},
                              {**step(0, {"a": (0, 1, "prefill")}), "time": 0.5}, step(1, {})])
        self.assertEqual(tracks, {name: [(shown, 0, SECOND // 4), (shown, SECOND // 2, SECOND // 2)]
                                  for name, shown in (("steps", "step 0"), ("a", "prefill 0"))})


class RunTest(FormatCase):
    def test_real_runs(self) -> None:
        """Every chunk of a completed step is a slice; waits and preemptions fill the time between."""
        runs = [read_timeline(TIMELINE), list(full_engine().timeline), *map(random_run, range(5000, 5004))]
        for number, events in enumerate(runs):
            with self.subTest(run=number):
                trace = chrome_trace(events)
                self.check_format(trace)
                shown = Counter(event["name"].split()[0] for event in trace if event["ph"] in "Xi")
                steps = [event for event in events if event["event"] == "step"]
                chunks = [chunk for event in steps for chunk in event["chunks"]]
                self.assertEqual(shown["prefill"] + shown["decode"], len(chunks))
                self.assertEqual(shown["step"], len(steps))
                kinds = Counter(event["event"] for event in events)
                self.assertEqual((shown["token"], shown["finish:"], shown["fault:"], shown["sample"]),
                                 (kinds["token"], kinds["finish"], kinds["fault"], kinds["fork"]))
                counters = Counter(event["name"] for event in trace if event["ph"] == "C")
                self.assertEqual(counters, {"budget": len(steps), "requests": len(steps), "pages": kinds["pages"]})
                self.assertEqual(chrome_trace(events), trace)

    def test_nothing_and_the_beginning_of_a_timeline(self) -> None:
        self.assertEqual(chrome_trace([]), [])
        events = list(full_engine().timeline)
        for end in range(1, len(events), 9):
            self.check_format(chrome_trace(events[:end]))


class WriteTest(unittest.TestCase):
    def test_the_file(self) -> None:
        events = read_timeline(TIMELINE)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            write_chrome_trace(events, path)
            self.assertEqual(json.loads(path.read_text(encoding="utf-8")),
                             {"displayTimeUnit": "ms", "traceEvents": chrome_trace(events)})
            for wrong in (folder, path / "x", "a\0b"):
                self.assertRaisesRegex(SchemaError, "cannot write the trace", write_chrome_trace, events, wrong)


if __name__ == "__main__":
    unittest.main()
