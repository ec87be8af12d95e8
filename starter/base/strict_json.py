"""Shapes of JSON values: one declaration that parses strictly, writes back, and prints its JSON Schema.

``schema.py`` says *what* a scenario looks like; this file says what "looks like" means. A shape knows
three things, so that the three can never disagree:

    parse(value, path)  a plain JSON value -> a checked Python value, or SchemaError with a JSON pointer
    dump(value)         the way back; parse(dump(x)) == x
    json_schema()       the same rule as JSON Schema, draft 2020-12

Strict means: unknown and duplicate keys, NaN and Infinity, booleans where a number is wanted, and
documents too deep or too large are refused, never guessed at.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from starter.errors import EngineError, SchemaError

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 32
MAX_INTEGER_DIGITS = 32
_BRACKETS_OR_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class Shape(Protocol):
    """What every shape below can do."""

    def parse(self, value: object, path: str) -> Any: ...

    def dump(self, value: Any) -> object: ...

    def json_schema(self) -> dict[str, object]: ...


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


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer in [low, high]; a boolean or 3.0 is not one."""

    low: int = 0
    high: int = 2**31 - 1

    def parse(self, value: object, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise SchemaError(f"an integer from {self.low} to {self.high} is wanted, not {describe(value)}", path)
        if not self.low <= value <= self.high:
            raise SchemaError(f"must be from {self.low} to {self.high}, not {_short(value)}", path)
        return value

    def dump(self, value: int) -> object:
        return value

    def json_schema(self) -> dict[str, object]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite number in [low, high]."""

    low: float
    high: float

    def parse(self, value: object, path: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise SchemaError(f"a number from {self.low} to {self.high} is wanted, not {describe(value)}", path)
        if not self.low <= value <= self.high:  # NaN fails every comparison
            raise SchemaError(f"must be from {self.low} to {self.high}, not {_short(value)}", path)
        return float(value)

    def dump(self, value: float) -> object:
        return int(value) if float(value).is_integer() else value  # 3.0 is written 3, as a person would

    def json_schema(self) -> dict[str, object]:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclasses.dataclass(frozen=True)
class Boolean:
    """true or false."""

    def parse(self, value: object, path: str) -> bool:
        if not isinstance(value, bool):
            raise SchemaError(f"true or false is wanted, not {describe(value)}", path)
        return value

    def dump(self, value: bool) -> object:
        return value

    def json_schema(self) -> dict[str, object]:
        return {"type": "boolean"}


@dataclasses.dataclass(frozen=True)
class Text:
    """A string of shortest..longest characters."""

    shortest: int = 0
    longest: int = 65_536

    def parse(self, value: object, path: str) -> str:
        if not isinstance(value, str):
            raise SchemaError(f"a string is wanted, not {describe(value)}", path)
        if not self.shortest <= len(value) <= self.longest:
            raise SchemaError(f"must have {self.shortest} to {self.longest} characters, not {len(value)}", path)
        if not value.isprintable() and any("\ud800" <= c <= "\udfff" for c in value):
            raise SchemaError("holds half of a surrogate pair, which no UTF-8 file can store", path)
        return value

    def dump(self, value: str) -> object:
        return value

    def json_schema(self) -> dict[str, object]:
        return {"type": "string", "minLength": self.shortest, "maxLength": self.longest}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of a few strings."""

    options: tuple[str, ...]

    def parse(self, value: object, path: str) -> str:
        if not isinstance(value, str) or value not in self.options:
            raise SchemaError(f"must be one of {', '.join(map(repr, self.options))}, not {describe(value)}", path)
        return value

    def dump(self, value: str) -> object:
        return value

    def json_schema(self) -> dict[str, object]:
        return {"enum": list(self.options)}


# ------------------------------------------------------------------------------------------- containers


@dataclasses.dataclass(frozen=True)
class Nullable:
    """The inner shape, or null."""

    inner: Shape

    def parse(self, value: object, path: str) -> Any:
        return None if value is None else self.inner.parse(value, path)

    def dump(self, value: Any) -> object:
        return None if value is None else self.inner.dump(value)

    def json_schema(self) -> dict[str, object]:
        return {"anyOf": [{"type": "null"}, self.inner.json_schema()]}


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of shortest..longest items of one shape, parsed to a tuple."""

    item: Shape
    shortest: int = 0
    longest: int = 1_000_000

    def parse(self, value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise SchemaError(f"a list is wanted, not {describe(value)}", path)
        if not self.shortest <= len(value) <= self.longest:
            raise SchemaError(f"must have {self.shortest} to {self.longest} items, not {len(value)}", path)
        return tuple(self.item.parse(item, pointer(path, i)) for i, item in enumerate(value))

    def dump(self, value: tuple[Any, ...]) -> object:
        return [self.item.dump(item) for item in value]

    def json_schema(self) -> dict[str, object]:
        return {"type": "array", "items": self.item.json_schema(), "minItems": self.shortest, "maxItems": self.longest}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A list of exactly two items, each of its own shape."""

    first: Shape
    second: Shape

    def parse(self, value: object, path: str) -> tuple[Any, Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise SchemaError(f"a list of two items is wanted, not {describe(value)}", path)
        return self.first.parse(value[0], pointer(path, 0)), self.second.parse(value[1], pointer(path, 1))

    def dump(self, value: tuple[Any, Any]) -> object:
        return [self.first.dump(value[0]), self.second.dump(value[1])]

    def json_schema(self) -> dict[str, object]:
        items = [self.first.json_schema(), self.second.json_schema()]
        return {"type": "array", "prefixItems": items, "minItems": 2, "maxItems": 2}


@dataclasses.dataclass(frozen=True)
class MapOf:
    """An object with free keys and values of one shape."""

    item: Shape

    def parse(self, value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(f"an object is wanted, not {describe(value)}", path)
        return {key: self.item.parse(item, pointer(path, key)) for key, item in value.items()}

    def dump(self, value: Mapping[str, Any]) -> object:
        return {key: self.item.dump(item) for key, item in value.items()}

    def json_schema(self) -> dict[str, object]:
        return {"type": "object", "additionalProperties": self.item.json_schema()}


@dataclasses.dataclass(frozen=True)
class Record:
    """An object with the fields of a dataclass or a NamedTuple; a field with a default may be left out.

    Rules that join several fields live in the dataclass's ``__post_init__``; an EngineError raised
    there is reported at the record's own path.
    """

    make: Callable[..., Any]
    fields: Mapping[str, Shape]
    sparse: bool | Collection[str] = False  # dump leaves out fields (these, or any) that have their default

    def _required(self) -> list[str]:
        return [name for name in self.fields if name not in self._defaults()]

    def _defaults(self) -> Mapping[str, object]:
        if issubclass(self.make, tuple):  # type: ignore[arg-type]
            return self.make._field_defaults  # type: ignore[attr-defined, no-any-return]
        return {f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory
                for f in dataclasses.fields(self.make)  # type: ignore[arg-type]
                if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING}

    def parse(self, value: object, path: str) -> Any:
        if not isinstance(value, dict):
            raise SchemaError(f"an object is wanted, not {describe(value)}", path)
        for key in value:
            if key not in self.fields:
                raise SchemaError(f"unknown key; allowed: {', '.join(self.fields)}", pointer(path, key))
        for key in self._required():
            if key not in value:
                raise SchemaError("this key is required and missing", pointer(path, key))
        arguments = {key: self.fields[key].parse(item, pointer(path, key)) for key, item in value.items()}
        try:
            return self.make(**arguments)
        except SchemaError as error:
            raise SchemaError(error.problem, path + error.path) from None
        except EngineError as error:
            raise SchemaError(str(error), path) from None

    def dump(self, value: Any) -> object:
        defaults = self._defaults()
        sparse = self.sparse if isinstance(self.sparse, Collection) else self.fields if self.sparse else ()
        return {name: shape.dump(getattr(value, name)) for name, shape in self.fields.items()
                if name not in sparse or name not in defaults or getattr(value, name) != defaults[name]}

    def json_schema(self) -> dict[str, object]:
        properties = {name: shape.json_schema() for name, shape in self.fields.items()}
        return {"type": "object", "properties": properties, "required": self._required(), "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class Tagged:
    """One of several records; the string under ``tag`` says which."""

    tag: str
    records: Mapping[str, Record]

    def parse(self, value: object, path: str) -> Any:
        if not isinstance(value, dict):
            raise SchemaError(f"an object is wanted, not {describe(value)}", path)
        if self.tag not in value:
            raise SchemaError("this key is required and missing", pointer(path, self.tag))
        name = Choice(tuple(self.records)).parse(value[self.tag], pointer(path, self.tag))
        return self.records[name].parse({k: v for k, v in value.items() if k != self.tag}, path)

    def dump(self, value: Any) -> object:
        name = next(name for name, record in self.records.items() if type(value) is record.make)
        fields = self.records[name].dump(value)
        assert isinstance(fields, dict)
        return {self.tag: name, **fields}

    def json_schema(self) -> dict[str, object]:
        variants = []
        for name, record in self.records.items():
            schema: dict[str, Any] = record.json_schema()
            schema["properties"] = {self.tag: {"const": name}, **schema["properties"]}
            schema["required"] = [self.tag, *schema["required"]]
            variants.append(schema)
        return {"oneOf": variants}


# ------------------------------------------------------------------------------------- reading documents


class _DuplicateKey(dict[str, object]):
    """An object in which ``key`` stood twice; found again, with its path, when the document is walked."""

    key = ""


class _BadNumber:
    """A number that JSON or we do not allow, kept in place so that the error can point at it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    marked = _DuplicateKey(result)
    marked.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return marked


def _integer(text: str) -> object:
    if len(text) > MAX_INTEGER_DIGITS:
        return _BadNumber(f"an integer of {len(text)} digits; at most {MAX_INTEGER_DIGITS} are allowed")
    return int(text)


def _number(text: str) -> object:
    value = float(text)
    return value if math.isfinite(value) else _BadNumber(f"{text[:20]} is beyond the range of a float")


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS_OR_STRINGS.finditer(text):
        token = match.group()
        if token in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in "]}":
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
    """Text -> plain JSON value, or SchemaError. Refuses what ``json`` waves through (see the module's docstring)."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise SchemaError(f"{len(text)} characters; at most {MAX_DOCUMENT_BYTES} are read")
    if (depth := _depth(text)) > MAX_DEPTH:
        raise SchemaError(f"nested {depth} levels deep; at most {MAX_DEPTH} are allowed")
    try:
        document: object = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number,
            parse_constant=lambda name: _BadNumber(f"{name} is not a JSON number"))
    except json.JSONDecodeError as error:
        raise SchemaError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    for path, value in _walk(document):
        if isinstance(value, _DuplicateKey):
            raise SchemaError("this key stands twice in one object", pointer(path, value.key))
        if isinstance(value, _BadNumber):
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
