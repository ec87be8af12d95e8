"""What is handed in: folders and zip files, good and hostile; what is kept of them, what the marker is told."""

from __future__ import annotations

import tempfile
import unittest
import zipfile
from pathlib import Path
from time import monotonic
from unittest import mock

from scripts.grading import submission
from scripts.grading.look import look
from scripts.grading.submission import BadSubmission, changed, take
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

    def test_what_zipfile_cannot_read(self):
        """Each ends in a sentence: an empty name is left out, the others make it a bad one."""
        path = self.zip({**GOOD, "starter/engine.py": "x = 12345\n"}, "method.zip")
        whole = path.read_bytes()
        at = whole.index(b"PK\x01\x02", whole.index(b"PK\x01\x02") + 1)  # the directory's entry of engine.py
        self.assertIn(b"engine.py", whole[at:at + 64])
        for what, place, value, says in (("version", 6, b"\xff\x00", "version"),
                                         ("method", 10, b"\x63\x00", "compress"),
                                         ("lzma", 10, b"\x0e\x00", "cannot be read"),
                                         ("name", 46, b"\xff\xff\xff", "cannot be read")):
            with self.subTest(what=what):
                changed_one = bytearray(whole)
                changed_one[at + place:at + place + len(value)] = value
                if what == "name":
                    changed_one[at + 8:at + 10] = b"\x00\x08"  # it says that it is UTF-8
                path.write_bytes(changed_one)
                self.refused(path, f"cannot be read.*{'' if 'read' in says else says}")
        path = self.place / "mira.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in {**GOOD, "empty": "nothing"}.items():
                archive.writestr(name, text)
            archive.filelist[-1].filename = ""
        self.assertTrue((self.take(path).tree / "starter" / "engine.py").is_file())

    def test_names_and_folders_that_do_no_harm(self):
        packages = {f"venv/lib/{i}.py": "" for i in range(30)} | {"mine/pyvenv.cfg": "", "mine/x.py": ""}
        for source in (self.zip({**GOOD, **packages, "12:30.md": "a"}), self.folder({**GOOD, **packages})):
            with self.subTest(source=source.name), mock.patch.object(submission, "MAX_FILES", 10), \
                    tempfile.TemporaryDirectory() as work:
                taken = take(source, ROOT, Path(work))
                self.assertEqual(taken.notes, ["left out, since it holds installed packages: mine/, venv/"])

    def test_a_path_that_is_too_long(self):
        """Of a paper: it is left out, and named."""
        taken = self.take(self.zip({**GOOD, f"runs/{'n' * 300}.md": "x"}))
        self.assertRegex(taken.notes[0], "runs/nnn.* was left out: ")

    def test_more_than_one_engine(self):
        """The newest counts, and the marker is told; one in a folder of its own beside the work does not."""
        path = self.place / "two.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for root, year in (("backup", 2024), ("final", 2026), ("final/old", 2027)):
                for name in ("__init__.py", "engine.py"):
                    archive.writestr(zipfile.ZipInfo(f"{root}/starter/{name}", (year, 1, 1, 0, 0, 0)), f"x = {year}\n")
        taken = self.take(path)
        self.assertEqual((taken.tree / "starter" / "engine.py").read_text(encoding="utf-8"), "x = 2026\n")
        self.assertEqual(taken.notes, ["starter/ is in it 3 times: graded is final/starter, the newest of those as far "
                                       "out; not backup/starter, final/old/starter"])


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

    def test_what_reaches_below_the_library(self):
        for code, says in (("import _posixsubprocess\n", "imports _posixsubprocess"), ("import _ctypes\n", "_ctypes"),
                           ("import _socket as s\n", "imports _socket"), ("import posix\n", "imports posix"),
                           ("import os as o\no.write(1, b'')\n", "line 2: uses os.write"),
                           ("from os import write\n", "uses os.write"),
                           ("x = '/proc/self/fd'\n", "of '/proc/self/fd'")):
            with self.subTest(code=code):
                self.assertIn(says, self.notes(code))
        self.assertEqual(self.notes("import sys\nsys.stdout.write('a')\n"), "")

    def test_read_as_python_reads_it(self):
        starter = self.folder({"starter/engine.py": ""}) / "starter"
        for source in (b"\xef\xbb\xbfimport subprocess\n",
                       "# coding: gbk\n# \u4e2d\u6587\nimport subprocess\n".encode("gbk")):
            (starter / "engine.py").write_bytes(source)
            self.assertRegex("".join(look(starter, ROOT / "starter", ROOT)), "imports subprocess$")
        self.assertEqual(self.notes(f"x = 0x{'f' * 5_000}\n"), "")

    def test_the_time_grows_with_the_size_alone(self):
        """Digits in a comment, a chain of attributes: each took minutes, and may take seconds."""
        began = monotonic()
        self.notes(f"# {'1' * 500_000}\n# {'1,2' * 100_000}\n" + f"x{'.a' * 300}\n" * 1_000)
        self.assertLess(monotonic() - began, 20)

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
