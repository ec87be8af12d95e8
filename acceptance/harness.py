"""What the acceptance tests are written with: messages that help, fresh models, a clock and a backend to observe with.

    class M2KVCache(Case):
        def test_something(self):
            '''V6: what must hold, in one sentence. It becomes the head of the failure message.'''
            run = Run(self, page_size=4)                 # observed.py: an engine on a model that nobody has seen before
            request = run.submit(run.prompt(5), 8)
            run.finish()                                 # steps, reads and checks everything

Models, weights and prompts are drawn anew in every run from one seed. A failure reads:

    V6: what must hold, in one sentence.
      expected: [3, 1, 4]
      happened: [3, 1, 5]
      hint:     where to look
      why:      what is at stake (why.py)
      replay:   the command that runs this test again, with the same draws, and keeps the timelines of its engines
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import tempfile
import time
import unittest
from _thread import interrupt_main
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from threading import Timer
from traceback import extract_tb

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

GENUINE = [(owner, name, getattr(owner, name)) for owner, names in (  # as they are before the engine is imported
    (time, ("perf_counter", "monotonic", "time")), (random.Random, ("random", "seed")), (os, ("_exit",)),
    (sys, ("exit",)),
    (unittest.TestCase, ("run", "fail", "assertEqual")), (json, ("loads", "dumps"))) for name in names]

from why import why

import starter  # its names are imported when first used, so one missing module fails its tests alone

SWITCH = "RUN_STUDENT_ACCEPTANCE"
SEED = os.environ.get("P07_SEED") or str(random.SystemRandom().randrange(1_000_000))
PATIENCE = 2_000  # steps after which a request that is still live counts as starved
HANG_SECONDS = int(os.environ.get("P07_HANG_SECONDS", "30"))  # a test that takes longer is interrupted
TIMELINES = os.environ.get("P07_TIMELINES")  # folder in which every engine's timeline is kept
INJECTED = "a fault injected by the acceptance suite"
BUGS = ("NotImplementedError", "RuntimeError", *(kind.__name__ for base in (
    ArithmeticError, AttributeError, ImportError, LookupError, NameError, TypeError, ValueError, AssertionError,
    RecursionError) for kind in (base, *base.__subclasses__())))  # errors that no engine means
TOLERANCE = 1e-3  # of logarithms of probabilities; float64 stays below 1e-12


# ----------------------------------------------------------------------------------------------------- messages


def _explained(test):
    """Wrap a test so that a failure says what must hold, what happened, and how to replay it."""
    rule = " ".join(test.__doc__.split())

    @wraps(test)
    def run(self):
        try:
            self.ready()
            return test(self)
        except SkipPart as part:
            return self.skipTest(str(part))
        except AssertionError as failure:
            error: BaseException = failure
            what = str(failure)
        except KeyboardInterrupt as interrupt:
            if not self.hung:
                raise
            error, what = interrupt, f"happened: a call did not return within {HANG_SECONDS} seconds"
        except (Exception, SystemExit) as other:  # whatever the engine raises, the suite goes on
            error, what = other, f"happened: {type(other).__name__}: {other}\n  where:    {_place(other)}"
        if isinstance(error, NotImplementedError):
            what += "\n  hint:     this part is still to be written"
        elif trouble := self._trouble():
            missing = "NotImplementedError" in trouble
            what += f"\n  {'missing: ' if missing else 'first:   '} {trouble}"
            if not missing and (place := _raised(type(self), self._testMethodName, trouble)):
                what += f"\n  where:    {place}"
        case = f"\n  case:     {self.case}" if self.case else ""
        name = ".".join(self.id().split(".")[-2:])
        replay = f"python3 -m acceptance {name} --seed {SEED} --timelines replay"
        numbers = rule.partition(":")[0]
        message = (f"{rule}\n  {what}{case}\n  why:      {why(rule)}\n  numbers:  docs/glossary.md says what "
                   f"{numbers} is about\n  replay:   {replay}")
        raise AssertionError(message).with_traceback(error.__traceback__) from None

    return run


def _place(error):
    """Where an exception was raised: the innermost line of the engine, with its text, where it passed through there."""
    if place := getattr(error, "remote_where", ""):  # in another process
        return place
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_file(error.filename)}, line {error.lineno}: {(error.text or '').strip()[:200]}"
    frames = extract_tb(error.__traceback__)
    mine = [frame for frame in frames if _is_engines(frame.filename)]
    if not frames:
        return "unknown"
    frame = (mine or frames)[-1]
    return f"{_file(frame.filename)}, line {frame.lineno}, in {frame.name}: {(frame.line or '').strip()[:200]}"


def _is_engines(filename):
    return Path(filename).is_relative_to(ROOT / "starter")


def _file(filename):
    """As the reader calls it: from the project's folder on."""
    path = Path(filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _raised(case, name, text):
    """Where an error was raised that the engine caught and reported as ``text``: the test runs once more, watched,
    since nobody can ask an error that is gone. "" where the engine runs elsewhere or the error does not come again."""
    found: list[str] = []

    def inside(frame, event, arg):
        if event == "exception" and not found and f"{arg[0].__name__}: {arg[1]}" == text:
            found.append(_place(arg[1].with_traceback(arg[2])))
        return inside

    def watch(frame, event, arg):
        if found or not _is_engines(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = False
        return inside

    again, before = case(name), sys.gettrace()
    if "_wire" in vars(starter) or before is not None:
        return ""
    with suppress(BaseException):
        sys.settrace(watch)
        try:
            again.setUp()
            getattr(case, name).__wrapped__(again)
        finally:
            sys.settrace(before)
            again.doCleanups()
    return found[0] if found else ""


def _short(value, other):
    """A value in a message; of long lists only what follows the first difference."""
    text = repr(value)
    if len(text) <= 400 or not isinstance(value, (list, tuple)):
        return text[:400]
    index = next((i for i, (a, b) in enumerate(zip(value, other)) if a != b), min(len(value), len(other)))
    return f"{len(value)} items, from index {index} on {value[index:index + 8]!r}"[:400]


def _plain(value):
    """The value as built-in data, which compares as it should, whatever its classes say of themselves."""
    kind = type(value)
    if kind in (int, float, str, bytes, bool, type(None)):
        return value
    if isinstance(value, float):  # of an array package, say
        return float.__add__(value, 0.0)
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return kind.__name__, [(field.name, _plain(getattr(value, field.name))) for field in fields(value)]
    raise AssertionError(f"happened: an object of class {kind.__name__}\n  hint:     plain data is wanted here: "
                         "built-in numbers, texts, lists, tuples and dictionaries")


def item_bytes(numbers):
    """The bytes that a stored number needs at least, by what comes back: 8 if single precision does not hold them all,
    4 if neither form of half precision does, else 2."""
    def fits(form, number):
        try:
            return struct.unpack(form, struct.pack(form, number))[0] == number
        except OverflowError:
            return False

    def is_bfloat(number):
        return fits("<f", number) and struct.pack("<f", number)[:2] == b"\0\0"

    numbers = [float(number) for number in numbers]
    if not all(fits("<f", number) for number in numbers):
        return 8
    return 2 if all(fits("<e", number) for number in numbers) or all(map(is_bfloat, numbers)) else 4


def given(test):
    """Decorator: what this tests is given to the students, so it is shown and worth no point."""
    test.given = True
    return test


class SkipPart(Exception):
    """Raised by a test for an optional part that the engine refuses with a clear error."""


class Case(unittest.TestCase):
    """Base of the milestones: ``self.rng``, and assertions that explain themselves.

    ``self.case`` may name what is tried at the moment, in a test that tries several things.
    """

    case = ""

    def __init_subclass__(cls):
        for name, test in list(vars(cls).items()):
            if name.startswith("test_"):
                setattr(cls, name, _explained(test))

    def setUp(self):
        self.rng = random.Random(".".join([SEED, *self.id().split(".")[-2:]]))
        self.hung = False
        self.engines = []
        watchdog = Timer(HANG_SECONDS, self._interrupt)
        watchdog.daemon = True
        watchdog.start()
        self.addCleanup(watchdog.cancel)

    def ready(self):
        """Fails while the milestone has not begun, so that its tests do not pass for want of what they look at."""

    def _trouble(self):
        """The first error that the engine reported of a request, if no test provoked it; what is still to be written
        comes first. "" if the engine has none, or cannot be asked any more."""
        try:
            errors = [str(event["error"]) for engine in self.engines for event in engine.timeline if event.get("error")]
        except Exception:  # its process has ended, or its timeline is still to be written
            return ""
        errors.sort(key=lambda error: "NotImplementedError" not in error)
        return next((error for error in errors if INJECTED not in error and error.partition(":")[0] in BUGS), "")

    def _interrupt(self):
        self.hung = True
        interrupt_main()

    def same(self, got, expected, hint):
        """``got`` must equal ``expected``, as plain data."""
        got, expected = _plain(got), _plain(expected)
        if got != expected:
            self._fail(f"expected: {_short(expected, got)}\n  happened: {_short(got, expected)}", hint)

    def that(self, condition, happened, hint):
        """The condition must hold; ``happened`` describes what was found."""
        if condition is not True:
            self._fail(f"happened: {happened}", hint)

    def refuses(self, error, call, hint):
        """The call must raise ``error`` (a class of starter/errors.py, or a tuple of them) with a message."""
        wanted = " or ".join(kind.__name__ for kind in (error if isinstance(error, tuple) else (error,)))
        try:
            result = call()
        except error as refusal:
            self.that(len(str(refusal)) > 10, f"{wanted} with the message {str(refusal)!r}",
                      "say what was given, what is allowed, and what to do")
        except Exception as other:
            self._fail(f"expected: {wanted}\n  happened: {type(other).__name__}: {other}", hint)
        else:
            self._fail(f"expected: {wanted}\n  happened: it returned {result!r}", hint)

    def _fail(self, what, hint):
        raise AssertionError(f"{what}\n  hint:     {hint}")


# ------------------------------------------------------------------------------------------------------- models


def load_document(document):
    """A scenario as a JSON document -> Scenario, through a file as any user would."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "scenario.json")
        path.write_text(json.dumps(document), encoding="utf-8")
        return starter.load_scenario(path)


def tiny_document(rng, **model):
    """A scenario document: a small model of a shape drawn at random, no requests; ``model`` fixes some of its sizes."""
    heads, kv_heads = rng.choice([(4, 2), (4, 1), (2, 2), (2, 1)])
    sizes = {"vocab_size": rng.randint(24, 40), "width": 16, "layers": rng.choice([1, 2]), "heads": heads,
             "kv_heads": kv_heads, "ffn_width": rng.choice([20, 24, 33]), "max_context": 160, "eos_tokens": [],
             "rope_theta": rng.choice([100.0, 10_000.0]), "tied_output": rng.random() < 0.5, **model}
    characters = "".join(chr(ord("a") + i) if i < 26 else chr(0x4E00 + i) for i in range(sizes["vocab_size"]))
    return {"version": 1, "name": "acceptance", "model": sizes, "requests": [],
            "weights": {"source": "seeded", "seed": 0},
            "tokenizer": {"characters": characters}}


def tiny_scenario(rng, **model):
    """The same, loaded."""
    return load_document(tiny_document(rng, **model))


class Clock:
    """A clock that only the harness moves: one second a step. It notices when it is asked for the time for ever."""

    def __init__(self):
        self.now, self._asked = 100.0, 0

    def __call__(self):
        self._asked += 1
        if self._asked > 100_000:
            raise AssertionError("happened: the engine runs steps for ever\n  hint:     end when nothing is live")
        return self.now

    def tick(self):
        self.now, self._asked = self.now + 1, 0


def plain_backend():
    """The backend in double precision: tokens are compared one by one, so its last bits count."""
    try:
        return starter.load_backend("reference")
    except starter.BackendError:  # the engine under test has one standard-library backend only
        return starter.load_backend("cpu")


class Meter:
    """The standard-library backend, counting the tokens that enter the decoder and failing on ``poison`` on demand.

    ``watch(batch)``, where set, sees whose pages every batch reads and writes, while the step still runs; ``store`` is
    where the numbers inside these pages are.
    """

    def __init__(self, poison=None):
        self.inner, self.poison, self.tokens = plain_backend(), poison, 0
        self.watch = self.store = None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def embed(self, table, tokens):
        if self.poison in tokens:
            raise RuntimeError(INJECTED)
        self.tokens += len(tokens)
        return self.inner.embed(table, tokens)

    def attend(self, q, k, v, layer, store, batch):
        if layer == 0 and self.watch:
            self.store = store
            self.watch(batch)
        return self.inner.attend(q, k, v, layer, store, batch)
