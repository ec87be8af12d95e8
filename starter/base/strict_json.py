"""Shapes of JSON values. A field declares its shape once; parsing, writing, checking and documentation follow from it.

    top_p: Annotated[float, Number(0.0, 1.0)] = 1.0      in a dataclass or a NamedTuple

    shape.parse(value, path)    JSON value -> checked Python value, or SchemaError with a JSON pointer to what is wrong
    shape.dump(value)           the way back: parse(dump(x), "") == x
    shape.json_schema()         the same rule in JSON Schema, draft 2020-12
    shape.problem(value)        the same rule for a Python argument: "must be a number from 0 to 1, not 2", or ""

``Record.of(kind)`` makes the shape of a whole dataclass from its fields; ``check_fields`` applies ``problem`` to every
field of one that was made in code, ``check_argument`` to one argument of a function. Two limits hold in files only:
``longest`` of a text, and ``in_file`` of a number that has no limit of its own. So code may use any id, and a clock or
a priority in any unit.

``parse_json`` and ``read_json`` are strict: they refuse duplicate keys, NaN, Infinity, and documents that are too deep
or too large. Shapes refuse unknown keys, and booleans in place of numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, get_origin, get_type_hints

from starter.errors import EngineError, RequestError, SchemaError

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 32
MAX_INTEGER_DIGITS = 32
_BRACKETS_OR_QUOTES = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class Shape(Protocol):
    """What every shape can do; see the module's docstring. Subclasses inherit ``dump`` and ``problem``."""

    def parse(self, value: object, path: str) -> Any: ...

    def json_schema(self) -> dict[str, object]: ...

    def dump(self, value: Any) -> object:
        return value

    def problem(self, value: object) -> str:
        return ""


def pointer(path: str, key: str | int) -> str:
    """Append one reference token to a JSON pointer, escaped as RFC 6901 asks."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def describe(value: object) -> str:
    """Name a value in an error message: its JSON type and, where short, itself."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    for kind, name in names.items():
        if isinstance(value, kind):
            return name if kind in (dict, list, type(None)) else f"{name} {_short(value)}"
    return f"the number {_short(value)}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:  # str() of a huge int is slow, or refused by Python
        return f"of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, (str, bool)) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---------------------------------------------------------------------------------------------- scalars


class _Range(Shape):
    """What Integer and Number share. A limit of None is no limit in code; in a file it is ``in_file`` (or -in_file)."""

    low: float | None
    high: float | None
    in_file: float
    _kind: ClassVar[str]
    _types: ClassVar[tuple[type, ...]]
    _format: ClassVar[str]

    def _limits(self) -> tuple[float, float]:
        """Lowest and highest in a file."""
        return -self.in_file if self.low is None else self.low, self.in_file if self.high is None else self.high

    def _has_type(self, value: object) -> bool:
        return isinstance(value, self._types) and not isinstance(value, bool)

    def parse(self, value: Any, path: str) -> Any:
        low, high = self._limits()
        if not self._has_type(value):
            raise SchemaError(f"expected {self._kind} from {low} to {high}, not {describe(value)}", path)
        if not low <= value <= high:  # NaN fails every comparison
            raise SchemaError(f"must be from {low} to {high}, not {_short(value)}", path)
        return value

    def problem(self, value: Any) -> str:
        if self._has_type(value) and (self.low is None or self.low <= value) and (
                self.high is None or value <= self.high):
            return ""
        low = "" if self.low is None else f" from {self.low:{self._format}}"
        high = "" if self.high is None else f" to {self.high:{self._format}}"
        return f"must be {self._kind}{low}{high}, not {value!r}"

    def json_schema(self) -> dict[str, object]:
        low, high = self._limits()
        return {"type": self._kind.split()[1], "minimum": low, "maximum": high}


@dataclasses.dataclass(frozen=True)
class Integer(_Range):
    """An integer in [low, high]; a boolean or 3.0 is not one."""

    low: int | None = 0
    high: int | None = None
    in_file: int = 2**31 - 1
    _kind, _types, _format = "an integer", (int,), "d"


@dataclasses.dataclass(frozen=True)
class Number(_Range):
    """A number in [low, high], parsed to a float; NaN is not one."""

    low: float | None
    high: float | None
    in_file: float = 1e300
    _kind, _types, _format = "a number", (int, float), "g"

    def parse(self, value: object, path: str) -> float:
        return float(super().parse(value, path))

    def dump(self, value: float) -> object:
        return int(value) if float(value).is_integer() else value  # 3.0 is written 3, as a person would


@dataclasses.dataclass(frozen=True)
class Boolean(Shape):
    """true or false."""

    def parse(self, value: object, path: str) -> bool:
        if not isinstance(value, bool):
            raise SchemaError(f"expected true or false, not {describe(value)}", path)
        return value

    def problem(self, value: object) -> str:
        return "" if isinstance(value, bool) else f"must be True or False, not {value!r}"

    def json_schema(self) -> dict[str, object]:
        return {"type": "boolean"}


@dataclasses.dataclass(frozen=True)
class Text(Shape):
    """A string of at least ``shortest`` characters, in a file at most ``longest``."""

    shortest: int = 0
    longest: int = 65_536

    def parse(self, value: object, path: str) -> str:
        if not isinstance(value, str):
            raise SchemaError(f"expected a string, not {describe(value)}", path)
        if not self.shortest <= len(value) <= self.longest:
            raise SchemaError(f"must have {self.shortest} to {self.longest} characters, not {len(value)}", path)
        if _has_surrogate(value):
            raise SchemaError("holds half of a surrogate pair, which no UTF-8 file can store", path)
        return value

    def problem(self, value: object) -> str:
        if not isinstance(value, str) or len(value) < self.shortest:
            return f"must be a string{' that is not empty' if self.shortest else ''}, not {value!r}"
        return f"{value!r} holds half of a surrogate pair, which is no character" if _has_surrogate(value) else ""

    def json_schema(self) -> dict[str, object]:
        return {"type": "string", "minLength": self.shortest, "maxLength": self.longest}


def _has_surrogate(text: str) -> bool:
    return not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text)


@dataclasses.dataclass(frozen=True)
class OneOf(Shape):
    """One of a few strings."""

    options: tuple[str, ...]

    def parse(self, value: object, path: str) -> str:
        if not isinstance(value, str) or value not in self.options:
            raise SchemaError(f"must be one of {', '.join(map(repr, self.options))}, not {describe(value)}", path)
        return value

    def problem(self, value: object) -> str:
        fits = isinstance(value, str) and value in self.options
        return "" if fits else f"must be {' or '.join(map(repr, self.options))}, not {value!r}"

    def json_schema(self) -> dict[str, object]:
        return {"enum": list(self.options)}


# ------------------------------------------------------------------------------------------- containers


@dataclasses.dataclass(frozen=True)
class Nullable(Shape):
    """The inner shape, or null."""

    inner: Shape

    def parse(self, value: object, path: str) -> Any:
        return None if value is None else self.inner.parse(value, path)

    def dump(self, value: Any) -> object:
        return None if value is None else self.inner.dump(value)

    def problem(self, value: object) -> str:
        return "" if value is None else self.inner.problem(value)

    def json_schema(self) -> dict[str, object]:
        return {"anyOf": [{"type": "null"}, self.inner.json_schema()]}


@dataclasses.dataclass(frozen=True)
class ListOf(Shape):
    """A list of shortest..longest items of one shape, parsed to a tuple."""

    item: Shape
    shortest: int = 0
    longest: int = 1_000_000

    def parse(self, value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise SchemaError(f"expected a list, not {describe(value)}", path)
        if not self.shortest <= len(value) <= self.longest:
            raise SchemaError(f"must have {self.shortest} to {self.longest} items, not {len(value)}", path)
        return tuple(self.item.parse(item, pointer(path, i)) for i, item in enumerate(value))

    def dump(self, value: tuple[Any, ...]) -> object:
        return [self.item.dump(item) for item in value]

    def json_schema(self) -> dict[str, object]:
        return {"type": "array", "items": self.item.json_schema(), "minItems": self.shortest, "maxItems": self.longest}


@dataclasses.dataclass(frozen=True)
class Pair(Shape):
    """A list of exactly two items, each of its own shape."""

    first: Shape
    second: Shape

    def parse(self, value: object, path: str) -> tuple[Any, Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise SchemaError(f"expected a list of two items, not {describe(value)}", path)
        return self.first.parse(value[0], pointer(path, 0)), self.second.parse(value[1], pointer(path, 1))

    def dump(self, value: tuple[Any, Any]) -> object:
        return [self.first.dump(value[0]), self.second.dump(value[1])]

    def json_schema(self) -> dict[str, object]:
        items = [self.first.json_schema(), self.second.json_schema()]
        return {"type": "array", "prefixItems": items, "minItems": 2, "maxItems": 2}


@dataclasses.dataclass(frozen=True)
class MapOf(Shape):
    """An object with free keys and values of one shape."""

    item: Shape

    def parse(self, value: object, path: str) -> dict[str, Any]:
        return {key: self.item.parse(item, pointer(path, key)) for key, item in _object(value, path).items()}

    def dump(self, value: Mapping[str, Any]) -> object:
        return {key: self.item.dump(item) for key, item in value.items()}

    def json_schema(self) -> dict[str, object]:
        return {"type": "object", "additionalProperties": self.item.json_schema()}


@dataclasses.dataclass(frozen=True)
class Record(Shape):
    """An object with the fields of a dataclass or a NamedTuple; a field with a default may be left out.

    Rules that join several fields live in the dataclass's ``__post_init__``; an EngineError raised there is reported
    at the record's own path.
    """

    make: Callable[..., Any]
    fields: Mapping[str, Shape]
    sparse: bool | Collection[str] = False  # dump leaves out fields (these, or any) that have their default

    @classmethod
    def of(cls, kind: type, sparse: bool | Collection[str] = False) -> Record:
        """The shape of ``kind``, whose fields declare theirs."""
        return cls(kind, shapes_of(kind), sparse)

    def _required(self) -> list[str]:
        defaults = defaults_of(self.make)
        return [name for name in self.fields if name not in defaults]

    def parse(self, value: object, path: str) -> Any:
        given = _object(value, path)
        for key in given:
            if key not in self.fields:
                raise SchemaError(f"unknown key; allowed: {', '.join(self.fields)}", pointer(path, key))
        for key in self._required():
            if key not in given:
                raise SchemaError("this key is required and missing", pointer(path, key))
        arguments = {key: self.fields[key].parse(item, pointer(path, key)) for key, item in given.items()}
        try:
            return self.make(**arguments)
        except SchemaError as error:
            raise SchemaError(error.problem, path + error.path) from None
        except EngineError as error:
            raise SchemaError(str(error), path) from None

    def dump(self, value: Any) -> dict[str, object]:
        defaults = defaults_of(self.make)
        sparse = self.sparse if isinstance(self.sparse, Collection) else self.fields if self.sparse else ()
        return {name: shape.dump(getattr(value, name)) for name, shape in self.fields.items()
                if name not in sparse or name not in defaults or getattr(value, name) != defaults[name]}

    def problem(self, value: object) -> str:
        fits = isinstance(self.make, type) and isinstance(value, self.make)
        return "" if fits else f"must be a {self.make.__name__}, not {value!r}"

    def json_schema(self) -> dict[str, object]:
        properties = {name: shape.json_schema() for name, shape in self.fields.items()}
        return {"type": "object", "properties": properties, "required": self._required(), "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class Tagged(Shape):
    """One of several records; the string under ``tag`` says which."""

    tag: str
    records: Mapping[str, Record]

    def parse(self, value: object, path: str) -> Any:
        given = _object(value, path)
        if self.tag not in given:
            raise SchemaError("this key is required and missing", pointer(path, self.tag))
        name = OneOf(tuple(self.records)).parse(given[self.tag], pointer(path, self.tag))
        return self.records[name].parse({k: v for k, v in given.items() if k != self.tag}, path)

    def dump(self, value: Any) -> object:
        name = next(name for name, record in self.records.items() if type(value) is record.make)
        return {self.tag: name, **self.records[name].dump(value)}

    def json_schema(self) -> dict[str, object]:
        variants = []
        for name, record in self.records.items():
            schema: dict[str, Any] = record.json_schema()
            schema["properties"] = {self.tag: {"const": name}, **schema["properties"]}
            schema["required"] = [self.tag, *schema["required"]]
            variants.append(schema)
        return {"oneOf": variants}


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"expected an object, not {describe(value)}", path)
    return value


# ------------------------------------------------------------------------- fields that declare their shapes


@cache
def shapes_of(kind: type) -> Mapping[str, Shape]:
    """The shapes that the fields of a dataclass or NamedTuple declare with ``Annotated``, in order; fields without one
    are not part of the JSON."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


@cache
def defaults_of(kind: Any) -> Mapping[str, object]:
    """Default values, or the functions that make them, by the name of the field."""
    if issubclass(kind, tuple):
        return kind._field_defaults  # type: ignore[no-any-return]
    return {f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory
            for f in dataclasses.fields(kind)
            if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING}


def check_fields(record: Any, error: type[EngineError]) -> None:
    """Raise ``error`` for the first field of a record made in code that breaks its shape. Lists are left to the record,
    which may accept more than a list."""
    for name, shape in shapes_of(record.__class__).items():
        check_argument(name, getattr(record, name), shape, error)


def check_argument(name: str, value: object, shape: Shape, error: type[EngineError] = RequestError) -> None:
    """Raise ``error`` unless the argument has the shape."""
    if problem := shape.problem(value):
        raise error(f"{name} {problem}")


# ------------------------------------------------------------------------------------- documents


class _Refused:
    """A value that is not allowed, kept in its place so that the error can point at it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    return {key: _Refused("this key appears twice in one object")
            for key, count in Counter(key for key, _ in pairs).items() if count > 1}


def _integer(text: str) -> object:
    if len(text) > MAX_INTEGER_DIGITS:
        return _Refused(f"an integer of {len(text)} digits; at most {MAX_INTEGER_DIGITS} are allowed")
    return int(text)


def _number(text: str) -> object:
    value = float(text)
    return value if math.isfinite(value) else _Refused(f"{text[:20]} is beyond the range of a float")


def _depth(text: str) -> int:
    # Quotes one by one: a pattern of a whole string would keep a state for each of its characters.
    depth = deepest = 0
    quoted = False
    for match in _BRACKETS_OR_QUOTES.finditer(text):
        token = match.group()
        if token == '"':
            quoted = not quoted
        elif not quoted and token in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif not quoted and token in "]}":
            depth -= 1
    return deepest


def _walk(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, pointer(path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _walk(item, pointer(path, i))


def parse_json(text: str) -> object:
    """Text -> plain JSON value, or SchemaError. Stricter than ``json``: see the module's docstring."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise SchemaError(f"{len(text)} characters; at most {MAX_DOCUMENT_BYTES} are read")
    if (depth := _depth(text)) > MAX_DEPTH:  # before json, whose recursion would overflow
        raise SchemaError(f"nested {depth} levels deep; at most {MAX_DEPTH} are allowed")
    try:
        document: object = json.loads(
            text, object_pairs_hook=_members, parse_int=_integer, parse_float=_number,
            parse_constant=lambda name: _Refused(f"{name} is not a JSON number"))
    except json.JSONDecodeError as error:
        raise SchemaError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    for path, value in _walk(document):
        if isinstance(value, _Refused):
            raise SchemaError(value.reason, path)
    return document


def read_json(path: str | Path) -> object:
    """File -> plain JSON value. Every failure, a missing file included, is a SchemaError that names the file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise SchemaError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SchemaError(f"{path} is not UTF-8 text: {error}") from None
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise SchemaError(f"{path} has more than the {MAX_DOCUMENT_BYTES} bytes that are read")
    return parse_json(text)


def compact_json(document: Mapping[str, object]) -> str:
    """Indented JSON whose second level stays on one line: ``{"a": {<newline> "b": [1, 2, 3]}}``."""
    def block(opening: str, lines: Sequence[str], closing: str) -> str:
        return opening + "\n    " + ",\n    ".join(lines) + "\n  " + closing if lines else opening + closing

    parts = []
    for key, value in document.items():
        text = _one_line(value)
        if isinstance(value, Mapping):
            text = block("{", [f"{_one_line(k)}: {_one_line(v)}" for k, v in value.items()], "}")
        elif isinstance(value, list):
            text = block("[", [_one_line(item) for item in value], "]")
        parts.append(f"{_one_line(key)}: {text}")
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def _one_line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
