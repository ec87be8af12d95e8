"""What is handed in: folders and zip files, good and hostile; what is kept of them, what the marker is told."""

from __future__ import annotations

import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from scripts.grading import submission
from scripts.grading.submission import BadSubmission, changed, look, take
from tests.paths import ROOT

GOOD = {"starter/__init__.py": "", "starter/engine.py": "x = 1\n", "DESIGN.md": "# Mine\n", "runs/week1.jsonl": "{}\n"}


class SubmissionCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()

    def folder(self, files, name="mira"):
        root = self.place / name
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return root

    def zip(self, files, name="mira.zip"):
        path = self.place / name
        with zipfile.ZipFile(path, "w") as archive:
            for member, text in files.items():
                archive.writestr(member, text)
        return path

    def take(self, source):
        return take(source, ROOT, self.place / "work")

    def refused(self, source, says):
        with self.assertRaisesRegex(BadSubmission, says):
            self.take(source)
        self.assertFalse(list(self.place.rglob("outside*")))


class Taking(SubmissionCase):
    def test_a_folder_and_a_zip_file_of_it_are_the_same(self):
        for source in (self.folder(GOOD), self.zip({f"mira-1/{name}": text for name, text in GOOD.items()})):
            with self.subTest(source=source.name), tempfile.TemporaryDirectory() as work:
                taken = take(source, ROOT, Path(work))
                self.assertEqual(taken.name, "mira")
                self.assertEqual((taken.tree / "starter" / "engine.py").read_text(encoding="utf-8"), "x = 1\n")
                self.assertEqual(sorted(path.name for path in taken.papers.rglob("*") if path.is_file()),
                                 ["DESIGN.md", "week1.jsonl"])

    def test_tests_that_were_handed_in_do_not_count(self):
        taken = self.take(self.folder({**GOOD, "acceptance/harness.py": "cheat", "scripts/verify_scaffold.py": "cheat",
                                       "fixtures/tiny_model.json": "cheat"}))
        for name in ("acceptance/harness.py", "scripts/verify_scaffold.py", "fixtures/tiny_model.json"):
            self.assertEqual((taken.tree / name).read_bytes(), (ROOT / name).read_bytes())

    def test_without_an_engine_there_is_nothing_to_grade(self):
        self.refused(self.folder({"engine.py": ""}), "no starter/__init__.py")
        self.refused(self.place / "nothing", "neither a folder nor a zip file")

    def test_zip_files_that_lead_outside(self):
        for name in ("../outside.py", "/outside.py", "starter/../../outside.py", "..\\outside.py", "C:\\outside.py"):
            with self.subTest(name=name):
                self.refused(self.zip({**GOOD, name: "x"}), "leads out of it")

    def test_names_that_no_file_can_have(self):
        self.refused(self.zip({**GOOD, "starter/a": "x", "starter/a/b.py": "y"}), "a file and a folder have the same")
        self.refused(self.zip({**GOOD, f"starter/{'n' * 300}.py": "x"}), "cannot be unpacked: starter/nnn")

    def test_links_are_not_followed(self):
        entry = zipfile.ZipInfo("starter/link.py")
        entry.external_attr = 0o120777 << 16
        path = self.zip(GOOD)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(entry, "/etc/passwd")
        self.assertFalse((self.take(path).tree / "starter" / "link.py").exists())

    def test_limits(self):
        with mock.patch.object(submission, "MAX_FILES", 3):
            self.refused(self.zip(GOOD), "more than 3 files")
            self.refused(self.folder(GOOD), "more than 3 files")
        with mock.patch.object(submission, "MAX_ALL", 5):
            self.refused(self.zip(GOOD, "b.zip"), "more than")
        with mock.patch.object(submission, "MAX_SOURCE", 4):
            self.refused(self.zip(GOOD, "c.zip"), "a source file may have 4")

    def test_a_zip_bomb_is_not_unpacked(self):
        bomb = self.place / "bomb.zip"
        with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in GOOD:
                archive.writestr(name, "")
            archive.writestr("starter/big.py", bytes(3 << 20))
        with mock.patch.object(submission, "MAX_FILE", 1 << 20):
            self.refused(bomb, "big.py holds more than 1 MiB")

    def test_a_damaged_zip_file(self):
        path = self.zip({**GOOD, "starter/engine.py": "x = 12345\n"})
        path.write_bytes(path.read_bytes().replace(b"x = 12345", b"x = 54321"))
        self.refused(path, "engine.py in the zip file cannot be read")

    def test_what_is_no_zip_file(self):
        path = self.place / "bad.zip"
        path.write_bytes(b"PK\x03\x04 and no more")
        self.refused(path, "cannot be read")


class Looking(SubmissionCase):
    def notes(self, code):
        starter = self.folder({"starter/engine.py": code}) / "starter"
        return "\n".join(look(starter, ROOT / "starter", ROOT))

    def test_what_no_engine_needs(self):
        for code, says in (("import unittest\n", "line 1: imports unittest"),
                           ("from acceptance import x\n", "imports acceptance"),
                           ("import os\nos._exit(0)\n", "line 2: uses ._exit"), ("import time\ntime.time = 1\n",
                           "replaces time.time"), ("import sys\nsys.modules['json'] = 1\n", "uses .modules"),
                           ("x = (", "is not Python"), ("eval('1')\n", "uses eval")):
            with self.subTest(code=code):
                self.assertIn(says, self.notes(code))

    def test_golden_tokens(self):
        import json
        document = json.loads((ROOT / "fixtures" / "tiny_model.json").read_text(encoding="utf-8"))
        tokens = max(document["golden"]["tokens"].values(), key=len)
        self.assertIn("golden", self.notes(f"ANSWERS = {tokens}\n"))
        self.assertNotIn("golden", self.notes(f"ANSWERS = {[token + 1 for token in tokens]}\n"))

    def test_what_our_own_file_has_is_no_news(self):
        source = (ROOT / "starter" / "backends" / "workers" / "process.py").read_text(encoding="utf-8") + "\n# mine\n"
        starter = self.folder({"starter/backends/workers/process.py": source, "starter/other.py": source}) / "starter"
        notes = look(starter, ROOT / "starter", ROOT)
        self.assertTrue(notes)
        self.assertFalse([note for note in notes if not note.startswith("starter/other.py")])

    def test_given_files_that_were_changed(self):
        given = self.folder({"errors.py": "a\n", "engine.py": "stub\n", "base/strict_json.py": "c\n"}, "given")
        ours = self.folder({"errors.py": "a\n", "engine.py": "whole\n", "base/strict_json.py": "c\n"}, "ours")
        mine = self.folder({"errors.py": "b\n", "engine.py": "mine\n"}, "mine")
        self.assertEqual(changed(mine, given, ours), ["starter/base/strict_json.py was given, and is gone",
                                                      "starter/errors.py was given complete, and is changed"])


if __name__ == "__main__":
    unittest.main()
