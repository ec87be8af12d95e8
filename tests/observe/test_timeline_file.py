"""A timeline file read back: the same events, and a refusal that names the line where it is damaged."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

from starter.errors import SchemaError
from starter.observe.timeline_file import read_timeline
from starter.schema import MODEL_SHAPE
from starter.timeline import Event, Timeline
from tests.support import CONFIG, make_engine
from tests.timelines import as_read, full_engine, random_run

HEAD: Event = {"event": "header", "step": 0, "time": 0.0, "version": 2, "step_seconds": 1.0, "engine": "0",
               "backend": "cpu", "settings": {}, "model": MODEL_SHAPE.dump(CONFIG), "page_bytes": 64, "num_pages": 4,
               "weight_bytes": 10}
HEADER = json.dumps(HEAD, separators=(",", ":")) + "\n"
TOKEN = '{"event":"token","step":3,"time":3.0,"request":"a","index":0,"token":5,"text":"x"}\n'


class ReadTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name) / "run.jsonl"

    def refused(self, content: bytes, *words: str) -> None:
        self.path.write_bytes(content)
        with self.assertRaises(SchemaError) as caught:
            read_timeline(self.path)
        for word in (str(self.path), *words):
            self.assertIn(word, str(caught.exception))

    def test_no_timeline(self) -> None:
        for path in (self.path, self.path.parent, "a\0b"):
            with self.subTest(path=path), self.assertRaisesRegex(SchemaError, "cannot read the timeline"):
                read_timeline(path)
        self.refused(b"", "not a timeline")
        self.refused(TOKEN.encode(), "header")
        self.refused(HEADER.replace('version":2', 'version":1').encode(), "version 1", "2")
        self.refused(HEADER.replace(',"version":2', "").encode(), "version None")
        self.refused((HEADER * 2).encode(), "more than one header")

    def test_an_event_without_what_readers_rely_on(self) -> None:
        self.path.write_text(HEADER + '{"event":"token","step":0,"time":0,"request":"a","index":0}\n', encoding="utf-8")
        self.assertRaisesRegex(SchemaError, "line 2: this token event lacks token, text", read_timeline, self.path)

    def test_every_value_has_the_type_that_readers_rely_on(self) -> None:
        """Each key of each kind, as a run writes it, with values of all other types in its place."""
        kinds = {event["event"] + event.get("change", ""): event for event in as_read(full_engine().timeline)}
        free = {"backend", "engine", "text", "error", "scenario", "quantization", "weights_sha256", "step_seconds",
                "cache_salt"}
        for kind, event in kinds.items():
            for key, value in event.items():
                for other in ([], {}, "x", -1, 0.5, True, None, [None], [[1]], {"x": None}):
                    same = type(other) is type(value) and other not in ([None], [[1]])
                    if same or (key == "time" and other in (-1, 0.5)) or key in free:
                        continue
                    with self.subTest(kind=kind, key=key, other=other):
                        changed = json.dumps({**event, key: other})
                        line = "line 1" if kind == "header" else "line 2"
                        head = "" if kind == "header" else HEADER
                        self.refused((head + changed + "\n").encode(), line)

    def test_what_a_reader_does_not_know_is_left_alone(self) -> None:
        self.path.write_text(HEADER + '{"event":"news","step":0,"time":0,"x":[1]}\n' + TOKEN[:-2] + ',"y":7}\n',
                             encoding="utf-8")
        _, news, token = read_timeline(self.path)
        self.assertEqual((news["x"], token["y"]), ([1], 7))

    def test_damage_is_named_by_file_and_line(self) -> None:
        lines = [HEADER, *[TOKEN] * 5]
        for number in range(1, 7):
            for damage in (b"", b"{", b"[]", b"null", b"7", b'"event"', b"{}", b'{"event":"token"}',
                           b'{"event":7,"step":0,"time":0}', b'{"event":"token","step":0,"time":"0"}',
                           b'{"event":"token","step":0,"time":NaN}', b'{"event":"token","step":0.5,"time":1e999}',
                           b'{"event":"token","event":"token","step":0,"time":0}', b"\xff", b"\xef\xbb\xbf{}",
                           b"[" * 9999, TOKEN.encode()[:-3], TOKEN.encode()[:-1] * 2,
                           TOKEN.encode()[:-1].replace(b"x", b"\xc3")):
                with self.subTest(number=number, damage=damage[:60]):
                    content = [line.encode() for line in lines]
                    content[number - 1] = damage + b"\n"
                    self.refused(b"".join(content), f"line {number}:")

    def test_a_file_cut_anywhere_holds_its_whole_lines(self) -> None:
        """A crash loses at most the last line: what is before it reads as it was."""
        engine = make_engine(page_size=2)
        engine.generate([[1, 2, 3], [4]], 3)
        engine.timeline.write(self.path)
        lines, whole = self.path.read_bytes().splitlines(keepends=True), read_timeline(self.path)
        for number, line in enumerate(lines, start=1):
            before = b"".join(lines[:number - 1])
            with self.subTest(number=number):
                for cut in (len(line) - 1, len(line)):
                    self.path.write_bytes(before + line[:cut])
                    self.assertEqual(read_timeline(self.path), whole[:number])
                for cut in (1, len(line) // 2, len(line) - 2):
                    self.refused(before + line[:cut], f"line {number}:")

    def test_what_any_run_has_written_comes_back(self) -> None:
        for events in (as_read(full_engine().timeline), *map(random_run, range(10))):
            timeline = Timeline()
            for event in events:
                timeline.append(event)
            timeline.write(self.path)
            self.assertEqual(read_timeline(self.path), events)

    def test_line_ends_of_windows(self) -> None:
        self.path.write_bytes((HEADER + TOKEN).replace("\n", "\r\n").encode())
        self.assertEqual([event["event"] for event in read_timeline(self.path)], ["header", "token"])


if __name__ == "__main__":
    unittest.main()
