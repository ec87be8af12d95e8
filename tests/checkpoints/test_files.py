"""Files of checkpoints: opened with one clear error, written whole or not at all."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from starter.checkpoints.files import open_checkpoint, replace_file
from starter.errors import SchemaError


class FilesTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def test_whatever_cannot_be_opened_is_a_schema_error_that_names_it(self) -> None:
        for path in (self.folder / "missing", self.folder, "a\0b", ""):
            with self.subTest(path=path), self.assertRaisesRegex(SchemaError, "cannot") as caught, \
                    open_checkpoint(path):
                self.fail("it was opened")
            self.assertIn(str(path), str(caught.exception))

    def test_what_the_reader_finds_wrong_names_the_file_and_keeps_its_pointer(self) -> None:
        (self.folder / "file").write_bytes(b"abc")
        with self.assertRaisesRegex(SchemaError, "file: broken") as caught, \
                open_checkpoint(self.folder / "file") as (file, size):
            self.assertEqual((file.read(), size), (b"abc", 3))
            raise SchemaError("broken", "/x")
        self.assertEqual(caught.exception.path, "/x")
        with self.assertRaisesRegex(SchemaError, "cannot read .*file"), open_checkpoint(self.folder / "file"):
            raise OSError(5, "Input/output error")

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self) -> None:
        target = self.folder / "file"
        replace_file(target, [b"old"])

        def chunks():
            yield b"new, but"
            raise ValueError("broken off")

        with self.assertRaisesRegex(ValueError, "broken off"):
            replace_file(target, chunks())
        self.assertEqual(target.read_bytes(), b"old")
        replace_file(str(target), [b"ne", b"w"])
        self.assertEqual(target.read_bytes(), b"new")
        self.assertEqual(list(self.folder.iterdir()), [target])


if __name__ == "__main__":
    unittest.main()
