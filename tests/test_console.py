"""Printing that cannot crash a run, and tables."""

from __future__ import annotations

import io
import unittest

from starter.console import Console, Table


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
