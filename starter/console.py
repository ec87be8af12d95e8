"""Printing that cannot crash a run: a console that lacks a character gets a replacement for it.

Progress lines appear on a terminal only; a pipe or a file gets the lasting lines and nothing else.
"""

from __future__ import annotations

from typing import TextIO


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
        """Replace the progress line; "" removes it. Terminals only."""
        if self._quiet or self._stream is None or not self._stream.isatty():
            return
        self.write("\r" + text.ljust(len(self._progress)) + ("" if text else "\r"))
        self._progress = text


class Table:
    """Left-aligned columns as wide as their widest cell; the last column runs free."""

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
