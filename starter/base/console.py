"""Printing that cannot crash a run, and programs that end with one line instead of a traceback.

A character that the console cannot show is replaced, and a line on standard error says so once. On a terminal, lines
are folded to its width, in cells: a Chinese character takes two. Progress lines and colours appear only there (colours
not where NO_COLOR is set); a pipe or a file gets the lasting lines alone, as they are. A program is
``run_program(main)``, where ``main`` returns ``guarded(work)``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from traceback import extract_tb
from typing import NoReturn, TextIO
from unicodedata import category, combining, east_asian_width

from starter.errors import EngineError, SchemaError

EXIT_OK, EXIT_DIFFERS, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def cells(text: str) -> int:
    """How many cells of a terminal the text takes: two for a wide character, none for one that joins the last."""
    return sum(0 if combining(character) or category(character) in ("Mn", "Me", "Cf")
               else 2 if east_asian_width(character) in "WF" else 1 for character in text)


def _fitting(text: str, width: int) -> int:
    """How many characters of the text fit into ``width`` cells; at least one."""
    used = 0
    for number, character in enumerate(text):
        used += cells(character)
        if used > width:
            return max(number, 1)
    return len(text)


def cut(text: str, width: int) -> str:
    """The text, or as much of it as fits into ``width`` cells, with an ellipsis for the rest."""
    return text if cells(text) <= width else text[:_fitting(text, width - 1)] + "…"


def fold(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most ``width`` cells, broken at spaces where there are any, from the second on indented."""
    lines, margin = [], " " * min(indent, width // 2)
    while cells(text) > width:
        end = _fitting(text, width)
        space = text.rfind(" ", len(text) - len(text.lstrip(" ")), end + 1)
        at = space if space > 0 else end
        lines.append(text[:at].rstrip(" "))
        text = margin + text[at:].lstrip(" ")
    return [*lines, text]


_COLOURS = {"green": 32, "red": 31}


class Console:
    """Lines to a text stream; ``quiet`` swallows them."""

    def __init__(self, stream: TextIO | None, quiet: bool = False) -> None:
        """``stream`` is None where a program was started without that output: nothing is printed then."""
        self._stream, self._quiet = stream, quiet
        self._progress = ""
        self._replaced = False

    @property
    def width(self) -> int | None:
        """Cells in a line of the terminal; None where there is none."""
        if self._stream is None or not self._stream.isatty():
            return None
        return max(get_terminal_size().columns, 8)

    def colour(self, text: str, name: str) -> str:
        """The text "green" or "red" where the stream shows colours: on a terminal, unless
        NO_COLOR is set, and wherever FORCE_COLOR is set."""
        get = os.environ.get
        able = self.width is not None and get("TERM") != "dumb" and (os.name != "nt" or get("WT_SESSION"))
        shown = (able or get("FORCE_COLOR")) and not get("NO_COLOR")
        return f"\x1b[{_COLOURS[name]}m{text}\x1b[0m" if shown else text

    def write(self, text: str) -> None:
        """Text as it comes, shown at once."""
        if self._quiet or self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        shown = text.encode(encoding, errors="replace").decode(encoding)
        self._stream.write(shown)
        self._stream.flush()
        if shown != text and not self._replaced:
            self._replaced = True
            if sys.stderr is not self._stream:
                complain(f"note: this output is in {encoding}, which lacks some characters; they are shown as '?'. "
                         f"With PYTHONUTF8=1 all of them are written")

    def line(self, text: str = "", indent: int = 0, colour: str | None = None) -> None:
        """One lasting line; on a terminal it is folded, and what follows the first line indented."""
        lines = [text] if self.width is None else fold(text, self.width, indent)
        self.write("".join((self.colour(each, colour) if colour else each) + "\n" for each in lines))

    def progress(self, text: str) -> None:
        """Replace the progress line, cut to the terminal's width; "" removes it. Does nothing without a terminal."""
        if self._quiet or self.width is None:
            return
        text = cut(text, self.width - 1)
        self.write("\r" + text + " " * (cells(self._progress) - cells(text)) + ("" if text else "\r"))
        self._progress = text

    @contextmanager
    def working(self, text: str = "") -> Iterator[Callable[[str], None]]:
        """A progress line that is removed when the block ends, even by an error; yields ``progress``, to change it."""
        self.progress(text)
        try:
            yield self.progress
        finally:
            self.progress("")


class Table:
    """Left-aligned columns as wide as their widest entry; the last column is not padded. On a terminal it is cut to
    the width that is left."""

    def __init__(self, *head: str) -> None:
        self._rows: list[tuple[str, ...]] = [head]

    def add(self, *entries: object) -> None:
        """One row."""
        self._rows.append(tuple(map(str, entries)))

    def show(self, console: Console, indent: str = "") -> None:
        """Print head and rows."""
        widths = [max(map(cells, column)) for column in zip(*self._rows)][:-1]
        for *row, last in self._rows:
            line = indent + "".join(entry + " " * (width + 2 - cells(entry)) for entry, width in zip(row, widths))
            room = None if console.width is None else console.width - cells(line)
            console.line(line + (last if room is None or room < 8 else cut(last, room)))


def guarded(work: Callable[[], int]) -> int:
    """Run a program and return its exit code. Bad input, a full disk, too little memory and, in a student's project, a
    function that is still to be written end in one line on standard error and exit code 2. A reader that closes the
    pipe early is not an error."""
    try:
        code = work()
        if sys.stdout:  # None where the program was started without one
            sys.stdout.flush()  # a full disk shows here, not after the end
        return code
    except BrokenPipeError:
        return EXIT_OK
    except NotImplementedError as missing:
        complain(f"error: {to_be_written(missing)}")
        return EXIT_BAD_INPUT
    except (EngineError, OSError, MemoryError) as error:
        complain(f"error: {error}" if str(error) else "error: not enough memory; ask for fewer pages")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED


def to_be_written(missing: NotImplementedError) -> str:
    """Names the function that is missing."""
    where = extract_tb(missing.__traceback__)[-1]
    return str(missing) or f"{where.name} in {Path(where.filename).name}, line {where.lineno}, is still to be written"


def check_writable(path: str | Path) -> None:
    """SchemaError unless a file can be written there: to be checked before a run. An existing file is not changed."""
    try:
        new = not Path(path).exists()
        with open(path, "ab"):
            pass
        if new:
            Path(path).unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SchemaError(f"cannot write {path!s}: {error}") from None


def complain(problem: str) -> None:
    """One line on standard error. If that is closed or full, only the exit code is left."""
    with suppress(OSError):
        Console(sys.stderr).line(problem)


def started(text: str) -> str:
    """Text that names commands, as the program was started: where that was by the installed command, ``p07``, it calls
    itself so instead of ``python3 -m starter``."""
    by_name = bool(sys.argv) and Path(sys.argv[0]).stem == "p07"
    return text.replace("python3 -m starter", "p07") if by_name else text


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that ``main`` returns. Output that cannot be flushed is dropped, so that Python does not fail
    again on it at exit."""
    if sys.stderr is None:  # started without one; argparse up to Python 3.10 would fail
        sys.stderr = StringIO()
    try:
        sys.exit(main())
    except OSError:  # argparse could not print what is wrong with the options
        sys.exit(EXIT_BAD_INPUT)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream:
                    stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
