"""Printing that cannot crash a run, tables, and how programs end."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import unittest
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

from starter.base.console import Console, Table, cells, cut, fold, guarded
from starter.errors import RequestError
from tests.paths import FIXTURE, ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ConsoleTest(unittest.TestCase):
    def test_a_console_that_lacks_a_character_gets_a_replacement(self) -> None:
        for encoding, shown in (("ascii", "a? ??"), ("latin-1", "aé ??"), ("cp1252", "aé €?"), ("utf-8", "aé €世")):
            with self.subTest(encoding=encoding):
                raw = io.BytesIO()
                stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")  # errors="strict", as a console's
                Console(stream).line("aé €世")
                self.assertEqual(raw.getvalue().decode(encoding), shown + "\n")  # and it is there at once

    def test_half_a_surrogate_pair(self) -> None:
        stream = io.StringIO()
        Console(stream).write("a\ud800b")
        self.assertEqual(stream.getvalue(), "a?b")

    def test_lines(self) -> None:
        stream = io.StringIO()
        console = Console(stream)
        console.write("one")
        console.line()
        console.line("two")
        self.assertEqual(stream.getvalue(), "one\ntwo\n")

    def test_progress_is_replaced_and_removed_on_a_terminal(self) -> None:
        terminal = Terminal()
        console = Console(terminal)
        console.progress("loading the model")
        console.progress("step 1")
        console.progress("")
        console.line("done")
        self.assertEqual(terminal.getvalue(), "\rloading the model" "\rstep 1           " "\r      \r" "done\n")

    def test_progress_is_cut_to_the_line(self) -> None:
        terminal = Terminal()
        with mock.patch.dict(os.environ, {"COLUMNS": "11"}):
            Console(terminal).progress("0123456789abc")
        self.assertEqual(terminal.getvalue(), "\r012345678…")

    def test_a_wide_character_takes_two_cells(self) -> None:
        """Cut by characters, a progress line of Chinese would wrap, and be repeated at every change."""
        self.assertEqual([cells(text) for text in ("春眠", "a春", "e\u0301", "\u200d", "")], [4, 3, 1, 0, 0])
        self.assertEqual([cut("春眠不覺曉", width) for width in (10, 9, 5, 4)],
                         ["春眠不覺曉", "春眠不覺…", "春眠…", "春…"])
        terminal = Terminal()
        with mock.patch.dict(os.environ, {"COLUMNS": "10"}):
            Console(terminal).progress("春眠不覺曉")
            Console(terminal).line("處處聞啼鳥", indent=2)
        self.assertEqual(terminal.getvalue(), "\r春眠不覺…處處聞啼鳥\n")

    def test_long_lines_are_folded_on_a_terminal_alone(self) -> None:
        text = "          . late waits: needs 4 pages, 1 free; long frees 8 at its end"
        self.assertEqual(fold(text, 40, 12), ["          . late waits: needs 4 pages, 1",
                                              "            free; long frees 8 at its", "            end"])
        self.assertEqual(fold("abc " + "x" * 30 + " yy", 20, 4),
                         ["abc", "    " + "x" * 16, "    " + "x" * 14, "    yy"])
        for width in range(8, 60):
            for line in fold("春眠 不覺曉處處聞啼鳥 abc " * 5, width, 3):
                self.assertLessEqual(cells(line), width)
        stream = io.StringIO()
        Console(stream).line("x" * 500, indent=2)
        self.assertEqual(stream.getvalue(), "x" * 500 + "\n")

    def test_colours_only_on_a_terminal_that_may_show_them(self) -> None:
        for environment, stream, shown in (
                ({}, Terminal(), os.name != "nt"), ({"NO_COLOR": "1"}, Terminal(), False),
                ({"TERM": "dumb"}, Terminal(), False), ({}, io.StringIO(), False),
                ({"FORCE_COLOR": "1"}, io.StringIO(), True),
                ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, Terminal(), False)):
            with self.subTest(environment=environment), mock.patch.dict(os.environ, environment, clear=True):
                Console(stream).line("good", colour="green")
                self.assertEqual(stream.getvalue(), "\x1b[32mgood\x1b[0m\n" if shown else "good\n")

    def test_a_lacking_character_is_mentioned_once(self) -> None:
        stream, errors = io.TextIOWrapper(io.BytesIO(), encoding="ascii"), io.StringIO()
        with redirect_stderr(errors):
            console = Console(stream)
            for _ in range(3):
                console.line("曉")
        self.assertEqual(errors.getvalue().count("this output is in ascii"), 1)

    def test_a_progress_line_is_gone_when_its_work_is_done_and_when_it_fails(self) -> None:
        terminal = Terminal()
        with self.assertRaises(RequestError), Console(terminal).working("a") as progress:
            progress("bc")
            raise RequestError("no")
        self.assertEqual(terminal.getvalue(), "\ra" "\rbc" "\r  \r")

    def test_progress_is_not_for_files_and_pipes(self) -> None:
        stream = io.StringIO()
        Console(stream).progress("loading")
        self.assertEqual(stream.getvalue(), "")

    def test_quiet_says_nothing(self) -> None:
        terminal = Terminal()
        console = Console(terminal, quiet=True)
        for say in (console.write, console.line, console.progress):
            say("x")
        Table("a", "b").show(console)
        self.assertEqual(terminal.getvalue(), "")


class ProgramsTest(unittest.TestCase):
    """Each program of the spine, as a program of its own."""

    programs: Mapping[str, Sequence[str]] = {"schema": (), "driver": ("--fixture", str(FIXTURE), "--manifest-only")}
    bad: Mapping[str, Sequence[str]] = {"schema": ("--unknown",), "driver": ("--fixture", "nothing.json")}

    def start(self, name: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-m", f"starter.{name}", *arguments], cwd=ROOT, text=True,
                                env={**os.environ, "PYTHONUNBUFFERED": ""},
                                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams})

    def test_a_reader_that_has_seen_enough(self) -> None:
        for name, arguments in self.programs.items():
            with self.subTest(name), self.start(name, *arguments) as program:
                program.stdout.close()  # as `| head -1` does
                self.assertEqual((program.wait(), program.stderr.read()), (0, ""))

    @unittest.skipUnless(Path("/dev/full").exists(), "no file here stands for a full disk")
    def test_a_full_disk(self) -> None:
        for name, arguments in self.programs.items():
            with self.subTest(name), open("/dev/full", "w", encoding="utf-8") as full:
                with self.start(name, *arguments, stdout=full) as program:
                    self.assertRegex(program.stderr.read(), r"\Aerror: [^\n]*No space left[^\n]*\n\Z")
                self.assertEqual(program.returncode, 2)
                with self.start(name, "--help", stdout=full) as program:
                    self.assertNotIn("Traceback", program.stderr.read())

    def test_the_exit_code_tells_when_standard_error_cannot(self) -> None:
        """It is closed, or the disk is full: bad input is exit code 2 all the same."""
        for name, arguments in self.bad.items():
            closing = ("import os, sys; os.close(2); "
                       f"os.execv(sys.executable, [sys.executable, '-m', 'starter.{name}', *{arguments}])")
            with self.subTest(name):
                if os.name == "posix":
                    run = subprocess.run([sys.executable, "-c", closing], cwd=ROOT, capture_output=True, check=False)
                    self.assertEqual(run.returncode, 2)
                if Path("/dev/full").exists():
                    with open("/dev/full", "w", encoding="utf-8") as full, \
                            self.start(name, *arguments, stderr=full) as program:
                        self.assertEqual(program.wait(), 2)

    def test_the_schema_takes_no_arguments(self) -> None:
        with self.start("schema", "surplus") as program:
            self.assertIn("error: unrecognized arguments: surplus", program.stderr.read())
        self.assertEqual(program.returncode, 2)

    def test_troubles_that_are_no_bugs_are_one_line(self) -> None:
        for trouble, code, line in ((RequestError("a bad prompt"), 2, "error: a bad prompt\n"),
                                    (BrokenPipeError(), 0, ""),
                                    (OSError(28, "No space"), 2, "error: [Errno 28] No space\n"),
                                    (MemoryError(), 2, "error: not enough memory; ask for fewer pages\n"),
                                    (NotImplementedError("M2: f is missing"), 2, "error: M2: f is missing\n"),
                                    (KeyboardInterrupt(), 130, "interrupted\n")):
            with self.subTest(trouble=trouble), redirect_stderr(io.StringIO()) as told:
                self.assertEqual(guarded(mock.Mock(side_effect=trouble)), code)
                self.assertEqual(told.getvalue(), line)
        def unwritten() -> int:
            raise NotImplementedError

        with redirect_stderr(io.StringIO()) as told:
            self.assertEqual(guarded(unwritten), 2)
        self.assertRegex(told.getvalue(), r"^error: unwritten in test_console.py, line \d+, is still to be written\n$")
        self.assertEqual(guarded(lambda: 1), 1)
        self.assertRaises(ZeroDivisionError, guarded, lambda: 1 // 0)  # a bug stays one


class TableTest(unittest.TestCase):
    def test_columns_are_as_wide_as_their_widest_cell_and_the_last_runs_free(self) -> None:
        stream = io.StringIO()
        table = Table("request", "n", "text")
        table.add("a", 12345, "x" * 30)
        table.add("much longer", 1, "")
        table.show(Console(stream), indent="  ")
        self.assertEqual(stream.getvalue(), "  request      n      text\n"
                                            "  a            12345  " + "x" * 30 + "\n"
                                            "  much longer  1      \n")


if __name__ == "__main__":
    unittest.main()
