"""The worker's end of the wire: it keeps the submission's objects and carries out the judge's requests on them.

The submission runs in the worker's process. The other end is ``judge_wire.py``, the protocol ``wire.py``. This file is
copied beside the submission (``sandbox.py``), so it imports ``wire`` by its bare name.
"""

from __future__ import annotations

import builtins
from collections import Counter
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from traceback import extract_tb
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from wire import PLAIN, SPECIAL, Wire

TEXT = 20_000  # characters of an error
TREE = Path.cwd()  # the submission's, in which the worker is started
AHEAD = 32  # how many answers to consecutive reads are sent together


def _where(error):
    """The innermost line of the submission that an error passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_file(error.filename)}, line {error.lineno}: {(error.text or '').strip()[:200]}"
    frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(TREE)]
    if not frames:
        return ""
    frame = frames[-1]
    return f"{_file(frame.filename)}, line {frame.lineno}, in {frame.name}: {(frame.line or '').strip()[:200]}"


def _file(name):
    path = Path(name)
    return path.relative_to(TREE).as_posix() if path.is_relative_to(TREE) else path.name


class Foreign:
    """An object of the judge, which answers for its attributes and calls."""

    def __init__(self, wire, number):
        self.__dict__.update(_wire=wire, _number=number)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._wire.ask("get", self._number, name)
        if isinstance(found, MethodType):  # the judge answers with the same method every time
            self.__dict__[name] = found
        return found

    def __call__(self, *arguments, **keywords):
        wire = self._wire
        return wire.ask("call", self._number, None, {"t": list(map(wire.encode_argument, arguments))},
                        wire.encode(keywords))


class WorkerWire(Wire):
    """The worker's end. It carries out every request of the judge."""

    def __init__(self, reader, writer):
        super().__init__(reader, writer)
        self._held: dict[int, Any] = {}
        self._foreign: dict[int, Foreign] = {}
        self._errors: dict[str, Any] = {}
        self._told: set[type] = set()
        self._counts: Counter[int] = Counter()

    def answer(self, request):
        """A request starts with the numbers of objects that the judge no longer uses."""
        drops, *rest = request
        self._drop(drops)
        super().answer(rest)

    def perform(self, what, target=None, name=None, arguments=None, keywords=None):
        if what == "module":
            return __import__(target, fromlist=["*"])
        target = self._held[target]
        if what == "get":
            return getattr(target, name)
        if what == "repr":
            return repr(target)
        if what == "bool":
            return bool(target)
        if what == "reads":
            return self._read_ahead(getattr(target, name), self.decode(arguments), keywords)
        arguments, keywords = self.decode(arguments), self.decode(keywords)
        if name == "__next__":
            return next(target)
        if name == "__iter__":
            return iter(target)
        if name == "__call__":
            return target(*arguments, **keywords)
        return getattr(target, name)(*arguments, **keywords)

    def _read_ahead(self, method, head, first):
        found = [method(*head, first)]
        with suppress(Exception):  # the call that really asks for the failing one gets its error
            for place in range(first + 1, first + AHEAD):
                found.append(method(*head, place))
        return tuple(found)

    def _drop(self, numbers):
        for number in numbers:
            self._counts[number] -= 1
            if self._counts[number] <= 0:
                self._counts.pop(number)
                self._held.pop(number, None)

    def _hold(self, value):
        self._held[id(value)] = value
        self._counts[id(value)] += 1
        return id(value)

    def encode(self, value):
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, float):
            return float.__add__(value, 0.0)
        if kind is tuple:
            return {"t": [self.encode(item) for item in value]}
        if kind is list:
            return {"l": [self.encode(item) for item in value], "r": self._hold(value)}
        if kind is dict:
            return {"d": [[self.encode(key), self.encode(item)] for key, item in value.items()],
                    "r": self._hold(value)}
        if kind in (bytes, bytearray):
            return {"b": value.hex()}
        if kind in (set, frozenset):
            return {"s": [self.encode(item) for item in value]}
        if kind is Foreign:
            return {"e": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"x": self._error_class(value)}
        return self._encode_object(value, kind)

    def encode_argument(self, value):
        """Rows of numbers are not copied: the judge only passes them on."""
        return self._encode_object(value, list) if type(value) is list and value and type(value[0]) is list else \
            self.encode(value)

    def _encode_object(self, value, kind):
        data = {"o": self._hold(value), "c": id(kind)}
        frozen = is_dataclass(kind) and vars(kind)["__dataclass_params__"].frozen
        if kind not in self._told:  # classes are kept, so their ids are theirs alone
            self._told.add(kind)
            methods = [] if isinstance(value, (type, ModuleType)) else [
                name for one in kind.__mro__ for name, item in vars(one).items()
                if isinstance(item, (FunctionType, BuiltinFunctionType)) and not name.startswith("__")]
            data["k"] = {"name": kind.__name__, "methods": methods,
                         "special": [name for name in SPECIAL if hasattr(kind, name)],
                         "fields": [field.name for field in fields(kind)] if is_dataclass(kind) else None}
        names = [field.name for field in fields(kind)] if frozen else getattr(kind, "_fields", ()) if isinstance(
            value, tuple) else ()
        if names:
            data["f"] = {name: self.encode(getattr(value, name)) for name in names}
        return data

    def _error_class(self, kind):
        own = getattr(builtins, kind.__name__, None) is not kind
        self._errors[kind.__name__] = kind
        return [kind.__name__, own, [self._error_class(base) for base in kind.__bases__] if own else []]

    def encode_error(self, error):
        attributes = {name: self.encode(item) for name, item in getattr(error, "__dict__", {}).items()
                      if type(item) in PLAIN}
        return {"x": self._error_class(type(error)), "text": str(error)[:TEXT], "o": self._hold(error), "f": attributes,
                "w": _where(error)}

    def decode(self, data):
        if type(data) is not dict:
            return data
        [kind] = data.keys() - {"f"}
        content = data[kind]
        if kind == "r":
            return self._held[content]
        if kind == "m":
            return getattr(self._held[content[0]], content[1])
        if kind == "l":
            return [self.decode(item) for item in content]
        if kind == "t":
            return tuple(self.decode(item) for item in content)
        if kind == "d":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "b":
            return bytes.fromhex(content)
        if kind == "c":
            return slice(*map(self.decode, content))
        if kind == "p":
            return Path(content)
        if kind == "x":
            return self._errors.get(content) or getattr(builtins, content)
        if kind == "i":
            return iter([self.decode(item) for item in content])
        if content not in self._foreign:
            self._foreign[content] = Foreign(self, content)
        return self._foreign[content]

    def decode_error(self, data):
        if data["r"] in self._held:
            return self._held[data["r"]]
        kind: Any = self._errors.get(data["name"]) or getattr(builtins, data["name"], RuntimeError)
        try:
            return kind(data["text"])
        except Exception:
            return RuntimeError(data["text"])
