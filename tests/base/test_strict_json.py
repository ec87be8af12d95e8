"""Shapes: what each accepts and refuses, and where its error points; reading JSON strictly."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import tracemalloc
import unittest
from pathlib import Path
from typing import Annotated, NamedTuple

from starter.base.strict_json import (
    MAX_DEPTH,
    MAX_DOCUMENT_BYTES,
    MAX_INTEGER_DIGITS,
    Boolean,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    OneOf,
    Record,
    Shape,
    Tagged,
    Text,
    check_fields,
    describe,
    parse_json,
    pointer,
    read_json,
)
from starter.errors import EngineError, QuantizationError, SchemaError

ANYTHING: tuple[object, ...] = (None, True, False, 0, 7, 3.0, 2.5, "5", "", [], [1], {}, {"a": 1}, math.nan, math.inf)


@dataclasses.dataclass(frozen=True)
class Pair:
    left: int
    right: int = 0

    def __post_init__(self) -> None:
        if self.left > self.right:
            raise SchemaError("must not be the larger", "/left")
        if self.left == self.right == 9:
            raise QuantizationError("nines do not quantize")


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    tags: tuple[str, ...] = dataclasses.field(default_factory=tuple)


PAIR = Record(Pair, {"left": Integer(0, 9), "right": Integer(0, 9)})
NAMED = Record(Named, {"name": Text(1, 5), "tags": ListOf(Text(), longest=2)})
EITHER = Tagged("kind", {"pair": PAIR, "named": NAMED})
EXAMPLES: tuple[tuple[Shape, object, object], ...] = (  # shape, JSON, Python
    (Integer(-3, 3), -3, -3), (Number(0.0, 2.0), 1, 1.0), (Number(0.0, 2.0), 0.5, 0.5), (Boolean(), False, False),
    (Text(), "a\u00e9\u4e16\U0001f600\n", "a\u00e9\u4e16\U0001f600\n"), (OneOf(("x", "y")), "y", "y"),
    (Nullable(Integer()), None, None), (Nullable(Integer()), 4, 4), (ListOf(Integer()), [1, 2], (1, 2)),
    (MapOf(Integer()), {"a/b": 1, "": 2}, {"a/b": 1, "": 2}), (PAIR, {"left": 1, "right": 2}, Pair(1, 2)),
    (NAMED, {"name": "n", "tags": ["t"]}, Named("n", ("t",))),
    (EITHER, {"kind": "pair", "left": 0, "right": 0}, Pair(0, 0)),
    (EITHER, {"kind": "named", "name": "n", "tags": []}, Named("n")),
)


class Case(unittest.TestCase):
    def refused(self, shape: Shape, value: object, path: str, *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            shape.parse(value, "/here")
        self.assertEqual(caught.exception.path, path, value)
        for word in words:
            self.assertIn(word, str(caught.exception))


class ShapeTest(Case):
    def test_parse_and_dump_are_inverse(self) -> None:
        for shape, value, wanted in EXAMPLES:
            with self.subTest(shape=shape):
                parsed = shape.parse(value, "")
                self.assertEqual(parsed, wanted)
                self.assertIs(type(parsed), type(wanted))
                self.assertEqual(shape.dump(parsed), value)
                self.assertEqual(shape.parse(shape.dump(parsed), ""), parsed)

    def test_each_scalar_accepts_its_own_type_only(self) -> None:
        accepted: dict[Shape, list[object]] = {
            Integer(): [0, 7], Number(0.0, 9.0): [0, 7, 3.0, 2.5], Boolean(): [True, False], Text(): ["5", ""],
            OneOf(("5",)): ["5"], Nullable(Boolean()): [None, True, False], ListOf(Integer()): [[], [1]],
            MapOf(Integer()): [{}, {"a": 1}],
        }
        for shape, values in accepted.items():
            for value in ANYTHING:
                with self.subTest(shape=shape, value=value):
                    if any(type(value) is type(other) and value == other for other in values):
                        shape.parse(value, "/here")
                    else:
                        self.refused(shape, value, "/here", "not")

    def test_limits_are_inclusive(self) -> None:
        for shape, inside, outside in (
                (Integer(2, 4), (2, 4), (1, 5, -(10**5000), 10**5000, 2**31)),
                (Number(0.5, 2.0), (0.5, 2), (0.4999, 2.0001, math.nan, math.inf, -math.inf, 10**400, 1e308)),
                (Text(1, 3), ("a", "abc"), ("", "abcd")),
                (ListOf(Integer(), 1, 3), ([1], [1, 2, 3]), ([], [1, 2, 3, 4]))):
            for value in inside:
                shape.parse(value, "/here")
            for value in outside:
                with self.subTest(shape=shape, value=describe(value)):
                    self.refused(shape, value, "/here")

    def test_half_of_a_surrogate_pair_is_no_text(self) -> None:
        for value in ("\ud800", "a\udfffb", "\udc00\ud800", "\U0001f600\ud83d"):
            self.refused(Text(), value, "/here", "surrogate")

    def test_errors_point_into_containers(self) -> None:
        self.refused(ListOf(Integer()), [1, 2, "x"], "/here/2", '"x"')
        self.refused(MapOf(Integer()), {"a/b~c": None}, "/here/a~1b~0c", "null")
        self.refused(ListOf(MapOf(ListOf(Integer()))), [{}, {"": [0, 1.5]}], "/here/1//1")
        self.refused(PAIR, {"left": 1, "right": 10}, "/here/right", "10")
        self.refused(PAIR, [1, 2], "/here", "expected an object", "a list")

    def test_a_record_refuses_unknown_and_missing_keys(self) -> None:
        self.refused(PAIR, {"left": 1, "right": 2, "middle": 3}, "/here/middle", "left, right")
        self.refused(PAIR, {"left": 1, "a/b": 3}, "/here/a~1b")
        self.refused(PAIR, {"right": 2}, "/here/left", "missing")
        self.refused(PAIR, {"right": 2, "left": None}, "/here/left", "null")
        self.assertEqual(PAIR.parse({"left": 0}, ""), Pair(0, 0))
        self.assertEqual(NAMED.parse({"name": "n"}, ""), Named("n", ()))

    def test_rules_that_join_fields_are_reported_at_the_record(self) -> None:
        self.refused(PAIR, {"left": 2, "right": 1}, "/here/left", "must not be the larger")
        self.refused(PAIR, {"left": 9, "right": 9}, "/here", "nines")
        self.refused(ListOf(PAIR), [{"left": 2, "right": 1}], "/here/0/left")

    def test_a_tag_selects_the_record(self) -> None:
        self.refused(EITHER, {"left": 0}, "/here/kind", "missing")
        self.refused(EITHER, {"kind": "pear", "left": 0}, "/here/kind", "'pair', 'named'")
        self.refused(EITHER, {"kind": ["pair"], "left": 0}, "/here/kind")
        self.refused(EITHER, {"kind": "named", "left": 0}, "/here/left", "name, tags")
        self.refused(EITHER, "pair", "/here", "expected an object")

    def test_json_schema_says_the_same(self) -> None:
        self.assertEqual(PAIR.json_schema(), {
            "type": "object", "required": ["left"], "additionalProperties": False,
            "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 9},
                           "right": {"type": "integer", "minimum": 0, "maximum": 9}}})
        kinds = EITHER.json_schema()["oneOf"]
        assert isinstance(kinds, list)
        self.assertEqual([kind["properties"]["kind"] for kind in kinds], [{"const": "pair"}, {"const": "named"}])
        self.assertEqual([kind["required"] for kind in kinds], [["kind", "left"], ["kind", "name"]])
        self.assertEqual(Nullable(Text(1, 3)).json_schema(),
                         {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 3}]})
        self.assertEqual(ListOf(Boolean(), 1, 2).json_schema(),
                         {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2})
        self.assertEqual(MapOf(Number(0.0, 1.0)).json_schema(), {
            "type": "object", "additionalProperties": {"type": "number", "minimum": 0.0, "maximum": 1.0}})
        self.assertEqual(OneOf(("x", "y")).json_schema(), {"enum": ["x", "y"]})

    def test_values_are_described_in_few_words(self) -> None:
        for value, wanted in ((None, "null"), (True, "a boolean true"), ("x", 'a string "x"'), ([1], "a list"),
                              ({}, "an object"), (7, "the number 7"), (2.5, "the number 2.5"), (b"", "a bytes"),
                              (10**5000, "the number of 16610 bits")):
            self.assertEqual(describe(value), wanted)
        self.assertLess(len(describe("x" * 10**6)), 60)

    def test_pointers_are_escaped(self) -> None:  # RFC 6901, section 5
        self.assertEqual([pointer("", key) for key in ("foo", "", "a/b", "m~n", "~1", 0)],
                         ["/foo", "/", "/a~1b", "/m~0n", "/~01", "/0"])


@dataclasses.dataclass(frozen=True)
class Order:
    """A record whose fields declare their shapes; ``note`` declares none and stays out of the JSON."""

    count: Annotated[int, Integer(1, in_file=9)]
    share: Annotated[float, Number(0.0, 1e6)] = 0.0
    rank: Annotated[int, Integer(None, in_file=5)] = 0
    most: Annotated[int, Integer(1, 64)] = 1
    late: Annotated[float, Number(0.0, None, in_file=8.0)] = 0.0
    name: Annotated[str | None, Nullable(Text(1, 3))] = None
    gift: Annotated[bool, Boolean()] = False
    way: Annotated[str, OneOf(("sea", "land"))] = "sea"
    tags: Annotated[tuple[str, ...], ListOf(Text())] = ()
    pair: Annotated[Pair, PAIR] = Pair(0)
    note: str = ""

    def __post_init__(self) -> None:
        check_fields(self, QuantizationError)


class Point(NamedTuple):
    x: Annotated[int, Integer()]
    y: Annotated[int, Integer()] = 0


class DeclaredShapesTest(Case):
    def test_a_record_has_the_shapes_that_its_fields_declare(self) -> None:
        shape = Record.of(Order)
        self.assertEqual(list(shape.fields), [field.name for field in dataclasses.fields(Order)][:-1])
        self.assertEqual((shape.fields["most"], shape.fields["pair"]), (Integer(1, 64), PAIR))
        document = {"count": 9, "share": 0.5, "rank": -5, "most": 64, "late": 8, "name": "abc", "gift": True,
                    "way": "land", "tags": ["t"], "pair": {"left": 1, "right": 2}}
        order = Order(9, 0.5, -5, 64, 8.0, "abc", True, "land", ("t",), Pair(1, 2))
        self.assertEqual(shape.parse(document, ""), order)
        self.assertEqual(shape.dump(order), document)
        self.assertEqual(Record.of(Order, sparse=True).dump(Order(3)), {"count": 3})
        self.assertEqual(Record.of(Point).parse({"x": 1}, ""), Point(1))
        self.assertEqual(Record.of(Point).json_schema()["required"], ["x"])

    def test_arguments_break_the_same_rule_in_one_sentence(self) -> None:
        wrong: tuple[tuple[str, object, str], ...] = (
            ("count", 0, "must be an integer from 1, not 0"), ("count", True, "must be an integer from 1, not True"),
            ("share", -1, "must be a number from 0 to 1e+06, not -1"), ("share", math.nan, "1e+06, not nan"),
            ("rank", 0.5, "must be an integer, not 0.5"), ("most", 65, "must be an integer from 1 to 64, not 65"),
            ("late", "0", "must be a number from 0, not '0'"),
            ("name", "", "must be a string that is not empty, not ''"),
            ("name", "a\ud800", "holds half of a surrogate pair, which is no character"),
            ("gift", 1, "must be True or False, not 1"), ("way", "air", "must be 'sea' or 'land', not 'air'"),
            ("way", ["sea"], "must be 'sea' or 'land', not"), ("pair", {"left": 0}, "must be a Pair, not {'left': 0}"))
        for name, value, words in wrong:
            with self.subTest(name=name, value=value), self.assertRaises(QuantizationError) as caught:
                Order(**{"count": 1, name: value})  # type: ignore[arg-type]
            self.assertTrue(str(caught.exception).startswith(name + " "), caught.exception)
            self.assertIn(words, str(caught.exception))

    def test_code_may_go_beyond_the_limits_of_a_file(self) -> None:
        shape = Record.of(Order)
        for name, value in (("count", 10), ("rank", -6), ("rank", 6), ("late", 8.5), ("late", math.inf),
                            ("name", "abcd")):
            with self.subTest(name=name, value=value):
                Order(**{"count": 1, name: value})  # type: ignore[arg-type]
                self.refused(shape, {"count": 1, name: value}, f"/here/{name}", "must ")
        self.assertEqual(shape.fields["rank"].json_schema(), {"type": "integer", "minimum": -5, "maximum": 5})
        self.assertEqual(shape.fields["late"].json_schema(), {"type": "number", "minimum": 0.0, "maximum": 8.0})


class ParseJsonTest(unittest.TestCase):
    def refused(self, text: str, path: str, *words: str) -> None:
        with self.assertRaises(SchemaError) as caught:
            parse_json(text)
        self.assertEqual(caught.exception.path, path)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_plain_values(self) -> None:
        for text, wanted in (("{}", {}), ("[]", []), ('"\\ud83d\\ude00"', "\U0001f600"), ("0", 0), ("-0.0", 0.0),
                             (' {"a": [1, -2.5e3, true, null, "x"]}\r\n\t', {"a": [1, -2500.0, True, None, "x"]}),
                             ("1e308", 1e308), ("1e-400", 0.0), ("9" * MAX_INTEGER_DIGITS, 10**MAX_INTEGER_DIGITS - 1)):
            with self.subTest(text[:20]):
                self.assertEqual(parse_json(text), wanted)

    def test_not_json(self) -> None:
        for text in ("", " ", "{", "}", "[1,]", "[1, 2", "{'a': 1}", '{"a" 1}', "01", "+1", ".5", "1.", "0x1", "nul",
                     "True", "undefined", "1 2", "{} {}", "// a\n1",
                     '"\n"', '"', '"\\', '"\\x"', '"\\u12"', "\ufeff{}", "\0"):
            with self.subTest(text):
                self.refused(text, "", "not JSON", "line 1, column ")
        self.refused('{\n "a": 1,\n oops}', "", "line 3, column 2")

    def test_numbers_that_are_none(self) -> None:
        for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400 + ".0", "9" * 100_000,
                       "-" + "9" * MAX_INTEGER_DIGITS):
            for text, path in (("%s", ""), ('{"a": [0, {"b/c": %s}]}', "/a/1/b~1c"), ("[[], %s]", "/1")):
                with self.subTest(number=number[:20], text=text):
                    self.refused(text % number, path)

    def test_numbers_inside_strings_are_text(self) -> None:
        self.assertEqual(parse_json('["NaN", "1e999"]'), ["NaN", "1e999"])

    def test_duplicate_keys(self) -> None:
        for text, path in (('{"a": 1, "a": 1}', "/a"), ('{"a": {"b": 1, "c": 2, "b": 3}}', "/a/b"),
                           ('[0, {"": 1, "": 2}]', "/1/"),
                           ('{"x/y": 1, "z": 2, "x\\/y": 3}', "/x~1y"), ('{"a": 1, "\\u0061": 2}', "/a"),
                           ('{"p": [[{"q": {"q": {"~": 0, "~": 0}}}]]}', "/p/0/0/q/q/~0"),
                           ('{"a": {"b": 1, "b": 2}, "c": 1, "c": 1}', "/c"), ('{"a": 1, "a": NaN}', "/a")):
            with self.subTest(text):
                self.refused(text, path, "twice")
        self.assertEqual(parse_json('{"a": {"a": {"a": 1}}, "A": 2}'), {"a": {"a": {"a": 1}}, "A": 2})

    def test_depth(self) -> None:
        self.assertEqual(str(parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)), "[" * MAX_DEPTH + "]" * MAX_DEPTH)
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            for depth in (MAX_DEPTH + 1, 100_000):
                for text in (opening * depth + "1" + closing * depth, opening * depth):
                    with self.subTest(opening=opening, depth=depth):
                        self.refused(text, "", f"{depth} levels")

    def test_a_long_string_takes_little_more_than_its_own_memory(self) -> None:
        for string in ("x" * 2_000_000, '\\"' * 1_000_000):
            text = f'["{string}"]'
            tracemalloc.start()
            try:
                parse_json(text)
                self.assertLess(tracemalloc.get_traced_memory()[1], 5 * len(text))
            finally:
                tracemalloc.stop()

    def test_brackets_in_strings_have_no_depth(self) -> None:
        for string in ("[" * 100_000, "{" * 100, '\\"' + "[" * 100, "\\\\", "]" * 100 + "[" * 100):
            with self.subTest(string[:10]):
                self.assertEqual(len(str(parse_json(f'["{string}", []]'))), len(str([parse_json(f'"{string}"'), []])))
        self.refused('["' + "\\\\" + '", ' + "[" * 50, "", "51 levels")  # an escaped backslash does not hide the quote
        self.refused('"' + "[" * 100_000, "", "not JSON")  # a string without an end

    def test_size(self) -> None:
        self.refused(" " * MAX_DOCUMENT_BYTES + "1", "", str(MAX_DOCUMENT_BYTES))


class ReadJsonTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "file.json"

    def refused(self, content: bytes, *words: str) -> None:
        self.path.write_bytes(content)
        with self.assertRaises(SchemaError) as caught:
            read_json(self.path)
        self.assertEqual(caught.exception.path, "")
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_read(self) -> None:
        for content in ('{"é世": 1}', '{"é世":\r\n1}\r\n'):
            self.path.write_bytes(content.encode())
            self.assertEqual(read_json(self.path), {"é世": 1})
            self.assertEqual(read_json(str(self.path)), {"é世": 1})

    def test_not_utf8(self) -> None:
        text = '{"é": 1}'
        for content in (text.encode("latin-1"), text.encode("utf-16"), b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\x80"',
                        text.encode()[:3]):
            with self.subTest(content):
                self.refused(content, "UTF-8", str(self.path))

    def test_byte_order_mark_and_nothing(self) -> None:
        self.refused(b"\xef\xbb\xbf{}", "not JSON")
        self.refused(b"", "not JSON")

    def test_files_that_cannot_be_read(self) -> None:
        for path in (self.path, self.path.parent, self.path / "below", Path("x" * 5_000)):
            with self.subTest(path=path), self.assertRaisesRegex(SchemaError, "cannot read"):
                read_json(path)
        for name in ("a\0b", "\ud800"):
            with self.subTest(name=name), self.assertRaises(SchemaError):
                read_json(name)

    def test_size(self) -> None:
        with open(self.path, "wb") as file:
            file.truncate(MAX_DOCUMENT_BYTES + 1)
        with self.assertRaisesRegex(SchemaError, str(MAX_DOCUMENT_BYTES)):
            read_json(self.path)

    @unittest.skipUnless(Path("/dev/zero").exists(), "SKIPPED: this system has no /dev/zero")
    def test_a_file_without_end(self) -> None:
        with self.assertRaisesRegex(SchemaError, str(MAX_DOCUMENT_BYTES)):
            read_json("/dev/zero")


class FamilyTest(unittest.TestCase):
    def test_a_schema_error_is_of_the_family(self) -> None:
        with self.assertRaises(EngineError):
            parse_json("")


if __name__ == "__main__":
    unittest.main()
