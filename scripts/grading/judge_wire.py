"""The judge's end of the wire: the submission's objects as seen from outside.

No code comes over the wire, only names and numbers. ``_class`` makes classes of them whose methods forward to the
worker and do nothing else.
"""

from __future__ import annotations

import builtins
from dataclasses import make_dataclass
from pathlib import Path
from time import monotonic
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

from .wire import PLAIN, SPECIAL, Wire

SOON = 0.02  # seconds
READS = ("page", "read")  # methods that change nothing; of these the next answers are asked for together


class Remote:
    """An object of the worker."""

    _wire: JudgeWire
    _id = 0
    _known: dict[str, Any] = {}  # noqa: RUF012  each object gets one of its own
    _methods: frozenset[str] = frozenset()

    def __getattr__(self, name):
        if name in self._known:
            return self._known[name]
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in self._methods:
            return Method(self, name)
        return self._wire.get(self._id, name)

    def __repr__(self):
        if self._known:
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._known.items())})"
        return str(self._wire.ask("repr", self._id))[:2_000]

    def __bool__(self):
        return self._wire.ask("bool", self._id) is True

    def __enter__(self):
        return self._wire.ask("method", self._id, "__enter__", {"t": []}, {"d": []})

    def __exit__(self, *error):
        self._wire.ask("method", self._id, "__exit__", {"t": [None] * 3}, {"d": []})

    def __del__(self):
        self._wire.dropped.append(self._id)


def _special(name):
    """A method that Python looks for on the class."""
    return lambda self, *arguments, **keywords: Method(self, name)(*arguments, **keywords)


class Method:
    """A method of a remote object, not looked up before it is called."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __call__(self, *arguments, **keywords):
        wire, number = self.owner._wire, self.owner._id
        if self.name in READS and not keywords and type(arguments[-1]) is int:
            return wire.read(number, self.name, *arguments)
        return wire.ask("method", number, self.name, wire.encode(arguments), wire.encode(keywords))


class List(list[Any]):
    """A list of the worker, as it was when it came; handed back, it is that very list."""

    __slots__ = ("origin", "wire")
    origin: int
    wire: JudgeWire

    def __del__(self):
        self.wire.dropped.append(self.origin)


class Dict(dict[Any, Any]):
    """The same for a dictionary."""

    __slots__ = ("origin", "wire")
    origin: int
    wire: JudgeWire

    def __del__(self):
        self.wire.dropped.append(self.origin)


class RemoteError(Exception):
    """What an exception of an unknown class becomes."""


class JudgeWire(Wire):
    """The judge's end. ``lent`` are the classes whose objects may be handed over, beside functions."""

    def __init__(self, reader, writer, lent=()):
        super().__init__(reader, writer)
        self.lent, self.dropped = lent, []
        self._objects: WeakValueDictionary[int, Remote] = WeakValueDictionary()
        self._classes, self._errors, self._given = {}, {}, {}
        self._requests, self._last, self._ahead = 0, None, []  # how many there were; the last read; what follows it
        # The last attribute: (request, object, name), when, and its value
        self._got: tuple[Any, float, Any] = (None, 0.0, None)

    def module(self, name):
        """A module of the worker's process."""
        return self.ask("module", name)

    def get(self, number, name):
        """An attribute. Asked for again with nothing in between, it is what it was, if that was only just now: other
        threads of the worker may change it."""
        with self._lock:
            key, now = (self._requests, number, name), monotonic()
            if self._got[0] == key and now < self._got[1] + SOON:
                return self._got[2]
            value = self.ask("get", number, name)
            self._got = ((self._requests, number, name), now, value)
            return value

    def read(self, number, name, *arguments):
        """Call a method that changes nothing. Whoever asks for 3, then for 4, will want 5 too: nothing can change
        before the next request, so the answers to come are as good now as then."""
        with self._lock:
            key, place = (self._requests, number, name, self.encode(arguments[:-1])), arguments[-1]
            if place == 0 or self._last == (*key, place - 1):
                if place == 0 or not self._ahead:
                    self._ahead = list(self.ask("reads", number, name, key[3], place))[::-1]
                answer = self._ahead.pop()
            else:
                answer = self.ask("method", number, name, self.encode(arguments), {"d": []})
                self._ahead = []
            self._last = (self._requests, *key[1:], place)
            return answer

    def ask(self, *request):
        with self._lock:
            self._requests += 1
            drops, self.dropped[:] = self.dropped[:], []
            try:
                return super().ask(drops, *request)
            except KeyboardInterrupt:  # in the middle of an answer, which would be taken for that to the next question
                self.fault("it did not answer in time")
                raise

    def passes(self, error):
        return isinstance(error, Exception)

    # what the worker may ask for

    def perform(self, what, number, name=None, arguments=None, keywords=None):
        target = self._given.get(number)
        if target is None or (what == "get" and not isinstance(target, self.lent)):
            raise self.fault("it asked for what it was not given")
        if what != "call" and (type(name) is not str or name.startswith("_")):
            raise AttributeError(f"there is no {name}")
        if what == "get":
            return getattr(target, name)
        if what != "call":
            raise self.fault("it asked for what there is not")
        return target(*self.decode(arguments), **self.decode(keywords))

    def encode(self, value):
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, Remote):
            return {"r": value._id}
        if kind is Method:
            return {"m": [value.owner._id, value.name]}
        if kind in (List, Dict):
            return {"r": value.origin}
        if kind in (list, tuple):
            return {"l" if kind is list else "t": [self.encode(item) for item in value]}
        if kind is dict:
            return {"d": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind in (bytes, bytearray):
            return {"b": value.hex()}
        if kind is slice:
            return {"c": [self.encode(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, Path):
            return {"p": str(value)}
        if kind is type and issubclass(value, BaseException):
            return {"x": value.__name__}
        if hasattr(kind, "__next__"):
            return {"i": [self.encode(item) for item in value]}
        if isinstance(value, (list, tuple)):
            return {"t": [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"d": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, (FunctionType, MethodType, *self.lent)) or callable(value):
            self._given[id(value)] = value  # kept: the worker may use it at any time
            return {"e": id(value), "f": not isinstance(value, self.lent)}
        raise TypeError(f"an object of class {kind.__name__} cannot be handed to the submission")

    def decode(self, data):
        if type(data) in PLAIN:
            return data
        if type(data) is not dict:
            raise self.fault("a value that is none")
        try:
            if "t" in data:
                return tuple(map(self.decode, data["t"]))
            if "l" in data:
                return self._of_origin(List(map(self.decode, data["l"])), data)
            if "d" in data:
                return self._of_origin(Dict((self.decode(key), self.decode(item)) for key, item in data["d"]), data)
            if "b" in data:
                return bytes.fromhex(data["b"])
            if "s" in data:
                return frozenset(map(self.decode, data["s"]))
            if "e" in data:
                return self._given[data["e"]]
            if "x" in data:
                return self._error_class(data["x"])
            return self._remote(data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise self.fault("a value that is none") from None

    def _of_origin(self, found, data):
        found.origin, found.wire = int(data["r"]), self
        return found

    def _remote(self, data):
        number = int(data["o"])
        if "k" in data:
            self._classes[data["c"]] = self._class(data["k"])
        found = self._objects.get(number)
        if found is None or type(found) is not self._classes[data["c"]]:
            found = self._classes[data["c"]]()
            found.__dict__.update(_id=number, _known={})
            self._objects[number] = found
        else:
            self.dropped.append(number)  # the worker counts how often it sent it
        found.__dict__["_known"] = {str(name): self.decode(item) for name, item in data.get("f", {}).items()}
        return found

    def _class(self, known):
        """A subclass of Remote that has what Python looks for on classes."""
        space: dict[str, Any] = {"_wire": self, "_methods": frozenset(map(str, known["methods"]))}
        space.update((name, _special(name)) for name in known["special"] if name in SPECIAL)
        if known["fields"] is not None:
            named = make_dataclass("Named", [str(name) for name in known["fields"]])
            space["__dataclass_fields__"] = vars(named)["__dataclass_fields__"]
        return type(str(known["name"]), (Remote,), space)

    def _error_class(self, data):
        """The class of an exception, made here from its name and bases: [name, own?, bases]."""
        name, own, bases = data
        if not own:
            found = getattr(builtins, str(name), RemoteError)
            return found if isinstance(found, type) and issubclass(found, BaseException) else RemoteError
        if name not in self._errors:
            kinds = tuple(dict.fromkeys(self._error_class(base) for base in bases)) or (RemoteError,)
            self._errors[name] = type(str(name), kinds, {"__str__": lambda error: error.remote_text,
                                                         "remote_text": ""})
        return self._errors[name]

    def decode_error(self, data):
        try:
            kind, text = self._error_class(data["x"]), str(data["text"])
            error = kind.__new__(kind, text)
            error.args, error.remote_text = (text,), text
            error.remote_id, error.remote_where = int(data["o"]), str(data.get("w", ""))[:1_000]
            self.dropped.append(error.remote_id)  # with the next question; till then it can be raised there once more
            for name, value in data["f"].items():
                if not name.startswith("_"):
                    setattr(error, name, self.decode(value))
            return error
        except (KeyError, TypeError, ValueError, AttributeError):
            return self.fault("an error that is none")

    def encode_error(self, error):
        return {"name": type(error).__name__, "text": str(error)[:10_000], "r": getattr(error, "remote_id", None)}
