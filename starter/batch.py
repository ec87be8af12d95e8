"""One step's work as the decoder sees it: tokens of several requests laid flat, and where their pages are.

    request A decodes its token at position 9     request B prefills positions 0..2
    (pages of 4 slots: A holds pages 5, 0, 7)     (B holds page 2)

    row         0     1   2   3
    tokens     [a9 ,  b0, b1, b2]
    positions  [9  ,  0 , 1 , 2 ]
    slots      [29 ,  8 , 9 , 10]      slot = page * page_size + position % page_size; A writes page 7, offset 1
    spans      [A: row 0, end 10, pages (5, 0, 7)]  [B: rows 1-3, end 3, pages (2,)]
    logit_rows [0, 3]                  only rows whose next token is wanted reach the output projection

Nothing here depends on who shares the step: a row's numbers come from its own token, position and pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .records import quick


class Piece(NamedTuple):
    """What one request computes in a step: ``tokens`` at positions start, start + 1, ...; ``pages``: block table."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool


PlainPiece = tuple[Sequence[int], int, Sequence[int], bool]  # a Piece, or the same without the names


class Span(NamedTuple):
    """The rows of one request in a batch: rows first_row .. first_row + count - 1, positions end - count .. end - 1."""

    first_row: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    end: int
    pages: Sequence[int]
    page_size: int

    @property
    def context(self) -> list[int]:
        """Slots of positions 0 .. end - 1; the token at position p may look at the first p + 1. O(end)."""
        return slots(self.pages, self.page_size, 0, self.end)

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.end - self.count


_span = quick(Span)


def slots(pages: Sequence[int], page_size: int, start: int, end: int) -> list[int]:
    """Slots of the positions start .. end - 1 of a block table. O(end - start)."""
    first = start // page_size
    found = [page * page_size + offset for page in pages[first:-(-end // page_size)] for offset in range(page_size)]
    return found[start - first * page_size:end - first * page_size]


@dataclass
class Batch:
    """Flat rows of all pieces, in their order."""

    page_size: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[PlainPiece], page_size: int) -> Batch:
        """Lay the pieces flat. One without pages, of a request that is computed without a cache, has no slots.
        O(tokens)."""
        tokens: list[int] = []
        positions: list[int] = []
        written: list[int] = []
        spans: list[Span] = []
        logit_rows: list[int] = []
        for new, start, pages, wants_logits in pieces:
            count = len(new)
            spans.append(_span((len(tokens), count, start + count, pages, page_size)))
            tokens += new
            if count == 1 and pages:  # as nearly always
                positions.append(start)
                written.append(pages[start // page_size] * page_size + start % page_size)
            else:
                positions += range(start, start + count)
                written += slots(pages, page_size, start, start + count)
            if wants_logits:
                logit_rows.append(len(tokens) - 1)
        return cls(page_size, tokens, positions, written, spans, logit_rows)

    def pieces(self) -> list[Piece]:
        """The pieces that were laid flat. O(tokens)."""
        wanted = set(self.logit_rows)
        return [Piece(self.tokens[first:first + count], end - count, pages, first + count - 1 in wanted)
                for first, count, end, pages, _ in self.spans]
