"""Printing that cannot crash a run, and programs that end with one line instead of a traceback.

A character that the console cannot show is replaced. Progress lines appear only on a terminal; a pipe or a file gets
the lasting lines alone. A program is ``run_program(main)``, where ``main`` returns ``guarded(work)``.
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

from starter.errors import EngineError, SchemaError

EXIT_OK, EXIT_DIFFERS, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


class Console:
    """Lines to a text stream; ``quiet`` swallows them."""

    def __init__(self, stream: TextIO | None, quiet: bool = False) -> None:
        """``stream`` is None where a program was started without that output: nothing is printed then."""
        self._stream, self._quiet = stream, quiet
        self._progress = ""

    def write(self, text: str) -> None:
        """Text as it comes, shown at once."""
        if self._quiet or self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()

    def line(self, text: str = "") -> None:
        """One lasting line."""
        self.write(text + "\n")

    def progress(self, text: str) -> None:
        """Replace the progress line, cut to the terminal's width; "" removes it. Does nothing without a terminal."""
        if self._quiet or self._stream is None or not self._stream.isatty():
            return
        text = text[:get_terminal_size().columns - 1]
        self.write("\r" + text.ljust(len(self._progress)) + ("" if text else "\r"))
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
    """Left-aligned columns as wide as their widest cell; the last column is not padded."""

    def __init__(self, *head: str) -> None:
        self._rows: list[tuple[str, ...]] = [head]

    def add(self, *cells: object) -> None:
        """One row."""
        self._rows.append(tuple(map(str, cells)))

    def show(self, console: Console, indent: str = "") -> None:
        """Print head and rows."""
        widths = [max(map(len, column)) for column in zip(*self._rows)][:-1]
        for row in self._rows:
            console.line(indent + "  ".join([cell.ljust(width) for cell, width in zip(row, widths)] + [row[-1]]))


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
