"""The wire between judge and worker: values are copied, objects stay where they are, nothing leads into the judge."""

from __future__ import annotations

import io
import json
import os
import sys
import unittest
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Thread
from types import ModuleType
from unittest import mock

from tests.paths import ROOT

sys.path.insert(0, str(ROOT))

from scripts.grading import wire
from scripts.grading.judge_wire import JudgeWire
from scripts.grading.wire import Gone

with mock.patch.dict(sys.modules, wire=wire):  # the worker imports it from its own folder
    from scripts.grading.worker_wire import Foreign, WorkerWire


@dataclass(frozen=True)
class Info:
    """A frozen dataclass, which brings its fields along."""

    number: int
    names: tuple[str, ...]


class Refused(ValueError):
    """An error of the submission's own."""

    def __init__(self, text, path):
        super().__init__(text)
        self.path = path


class Anything(int):
    """Equal to everything, where it lives."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return True


class Engine:
    """What a submission might hold."""

    def __init__(self):
        self.log, self.numbers, self.asked = [], [3, 1, 2], 0

    def keep(self, values):
        self.log.append(values)
        return values is self.numbers

    def page(self, number):
        self.asked += 1
        if number > 5:
            raise IndexError(number)
        return Info(number, ("a",) * number)

    def refuse(self):
        raise Refused("no", "/x")

    def stream(self):
        yield from (1, 2, 3)

    def use(self, meter):
        return meter.count([1, 2]) + meter.count([3])


class Meter:
    """An object of the judge that it lends."""

    secret = 7

    def __init__(self):
        self.seen, self._hidden = [], "the seed"

    def count(self, tokens):
        self.seen += tokens
        return len(tokens)


class WireCase(unittest.TestCase):
    """A judge here, a worker in a thread, two pipes between them."""

    def setUp(self):
        (here, there), (back, forth) = os.pipe(), os.pipe()
        self.worker = WorkerWire(os.fdopen(here, "rb"), os.fdopen(forth, "wb"))
        self.judge = JudgeWire(os.fdopen(back, "rb"), os.fdopen(there, "wb"), lent=(Meter,))
        module = ModuleType("submission_of_the_test")
        module.Engine, module.Info, module.Refused, module.Anything = Engine, Info, Refused, Anything
        sys.modules[module.__name__] = module
        self.addCleanup(sys.modules.pop, module.__name__)
        thread = Thread(target=self.serve, daemon=True)
        thread.start()
        self.addCleanup(self.close, thread)
        self.remote = self.judge.module(module.__name__)

    def serve(self):
        with self.assertRaises(Gone):
            self.worker.serve()
        self.worker._writer.close()

    def close(self, thread):
        self.judge._writer.close()
        thread.join(10)
        for file in (self.judge._reader, self.worker._reader):
            file.close()

    def test_values_are_plain_data(self):
        engine = self.remote.Engine()
        for value in (None, True, 0, -3, 2.5, "text \ud800", b"\x00\xff", (1, (2,)), float("inf"), 10**30):
            engine.keep(value)
            self.assertEqual(engine.log[-1], value)
            self.assertIs(type(engine.log[-1]), type(value))
        self.assertEqual(engine.keep({"a": [1, {"b": 2}]}), False)
        self.assertEqual(engine.log[-1], {"a": [1, {"b": 2}]})

    def test_a_list_of_the_worker_goes_back_as_that_list(self):
        engine = self.remote.Engine()
        self.assertEqual(sorted(engine.numbers), [1, 2, 3])
        self.assertTrue(engine.keep(engine.numbers))
        self.assertFalse(engine.keep([3, 1, 2]))

    def test_an_object_equal_to_everything_is_equal_to_nothing(self):
        self.assertFalse(self.remote.Anything(3) == 3)
        self.assertIsNot(type(self.remote.Anything(3)), int)

    def test_errors_keep_their_class_text_and_attributes(self):
        engine = self.remote.Engine()
        with self.assertRaises(self.remote.Refused) as caught:
            engine.refuse()
        self.assertIsInstance(caught.exception, ValueError)
        self.assertEqual((str(caught.exception), caught.exception.path), ("no", "/x"))
        self.assertRegex(caught.exception.remote_where,
                         r"tests/tools/test_grade_wire.py, line \d+, in refuse: raise Refused\(")
        with self.assertRaises(AttributeError):
            _ = engine.nothing

    def test_frozen_dataclasses_bring_their_fields(self):
        info = self.remote.Engine().page(2)
        self.assertEqual([(field.name, getattr(info, field.name)) for field in fields(info)],
                         [("number", 2), ("names", ("a", "a"))])
        self.assertEqual(type(info).__name__, "Info")

    def test_reads_in_a_row_are_asked_for_together(self):
        engine = self.remote.Engine()
        self.assertEqual([engine.page(i).number for i in range(6)], list(range(6)))
        self.assertEqual(engine.asked, 7)  # the seventh raised, and was not told to anybody
        with self.assertRaises(IndexError):
            engine.page(6)
        self.assertEqual([engine.page(i).number for i in (4, 5, 0, 1)], [4, 5, 0, 1])

    def test_generators_and_identity(self):
        engine = self.remote.Engine()
        self.assertEqual(list(engine.stream()), [1, 2, 3])
        self.assertIs(self.remote.Engine, self.remote.Engine)

    def test_the_worker_uses_what_it_is_lent(self):
        meter = Meter()
        self.assertEqual(self.remote.Engine().use(meter), 3)
        self.assertEqual(meter.seen, [1, 2, 3])

    def test_nothing_else_of_the_judge_can_be_reached(self):
        meter, function = Meter(), lambda: None
        number = self.judge.encode(meter)["e"]
        for name in ("_hidden", "__class__", "__init__", "count.__globals__"):
            with self.subTest(name=name), self.assertRaises(AttributeError):
                self.judge.perform("get", number, name)
        with self.assertRaises(Gone):  # of a function nothing but its result
            self.judge.perform("get", self.judge.encode(function)["e"], "name")
        with self.assertRaises(Gone):
            self.judge.perform("get", 12345, "name")
        for what in ("module", "set", "repr", "reads"):
            with self.subTest(what=what), self.assertRaises(Gone):
                self.judge.perform(what, number, "seen", {"t": []}, {"d": [], "r": 0})
        with self.assertRaises(TypeError):  # neither a function nor lent
            self.judge.encode(sys)

    def test_the_judge_lets_go_of_what_it_no_longer_uses(self):
        engine = self.remote.Engine()
        for _ in range(50):
            _ = engine.numbers
        engine.keep(0)
        self.assertLess(len(self.worker._held), 30)


class Garbage(unittest.TestCase):
    """A worker that does not keep to the protocol."""

    def test_garbage_ends_the_conversation(self):
        for said in (b"", b"hello", b"[]", b'["ok"]', b'["ok", {"o": 1}]', b'["ok", {"t": 5}]', b'["ok", [1]]',
                     b'["ok", {"x": ["E"]}]', b'["no", {}]', b'["no", {"x": ["E", true, []]}]', b"[" * 10**5,
                     b'["ok", {"o": 1, "c": 2, "k": {"name": "A", "methods": [], "special": [], "fields": ["1 x"]}}]'):
            with self.subTest(said=said[:40]):
                said += b"\n"
                judge = JudgeWire(io.BytesIO(said), io.BytesIO())
                with self.assertRaises(Gone):
                    judge.module("starter")
                with self.assertRaises(Gone):
                    judge.module("starter")
                self.assertTrue(judge.broken)

    def test_a_message_has_a_size(self):
        """A worker that writes without end costs the judge no more than one message."""
        said = io.BytesIO(b'["ok", "' + b"x" * (wire.MOST + 1_000) + b'"]\n')
        judge = JudgeWire(said, io.BytesIO())
        with self.assertRaisesRegex(Gone, "a message of more than"):
            judge.module("starter")
        self.assertLessEqual(said.tell(), wire.MOST)
        self.assertLessEqual(wire.MOST, 16 << 20)

    def test_an_error_from_outside_cannot_be_one_of_the_harness(self):
        kind = ["SkipTest", True, [["AssertionError", True, []]]]
        said = json.dumps(["no", {"x": kind, "text": "", "o": 1, "f": {}}])
        judge = JudgeWire(io.BytesIO(said.encode() + b"\n"), io.BytesIO())
        with self.assertRaises(Exception) as caught:
            judge.module("starter")
        self.assertNotIsInstance(caught.exception, (AssertionError, unittest.SkipTest))

    def test_foreign_objects_show_no_inner_life(self):
        foreign = Foreign(None, 1)
        with self.assertRaises(AttributeError):
            _ = foreign.__wrapped__

    def test_paths_cross(self):
        encoded = JudgeWire(io.BytesIO(), io.BytesIO()).encode(Path("a"))
        self.assertEqual(WorkerWire(io.BytesIO(), io.BytesIO()).decode(encoded), Path("a"))


if __name__ == "__main__":
    unittest.main()
