"""A step's work laid flat: rows, slots, spans, and the rows whose logits are wanted."""

from __future__ import annotations

import random
import unittest

from starter.backend import Batch, Piece, Span


class BatchTest(unittest.TestCase):
    def test_the_drawing_in_the_docstring(self) -> None:
        batch = Batch.of([Piece([70], 9, (5, 0, 7), wants_logits=True),
                          Piece([80, 81, 82], 0, (2,), wants_logits=True)], page_size=4)
        self.assertEqual(batch.tokens, [70, 80, 81, 82])
        self.assertEqual(batch.positions, [9, 0, 1, 2])
        self.assertEqual(batch.slots, [29, 8, 9, 10])
        self.assertEqual(batch.logit_rows, [0, 3])
        self.assertEqual(batch.spans, [
            Span(0, 1, 10, (5, 0, 7), page_size=4), Span(1, 3, 3, (2,), page_size=4)])
        self.assertEqual([span.context for span in batch.spans], [[20, 21, 22, 23, 0, 1, 2, 3, 28, 29], [8, 9, 10]])
        self.assertEqual([span.start for span in batch.spans], [9, 0])

    def test_every_row_of_random_pieces(self) -> None:
        for seed in range(50):
            with self.subTest(seed=seed):
                dice = random.Random(seed)
                page_size, free = dice.randint(1, 5), dice.sample(range(100), 100)
                pieces = []
                for _ in range(dice.randint(0, 5)):
                    start, count, spare = dice.randint(0, 9), dice.randint(1, 7), dice.randint(0, 2)
                    pages = [free.pop() for _ in range(-(-(start + count) // page_size) + spare)]
                    pieces.append(Piece(dice.choices(range(50), k=count), start, pages, dice.random() < 0.5))
                batch = Batch.of(pieces, page_size)
                rows = [(piece, piece.start + i, token) for piece in pieces for i, token in enumerate(piece.tokens)]
                self.assertEqual(list(zip(batch.positions, batch.tokens)), [row[1:] for row in rows])
                self.assertEqual(batch.slots, [piece.pages[position // page_size] * page_size + position % page_size
                                               for piece, position, _ in rows])
                self.assertEqual(len(set(batch.slots)), len(rows))
                row = 0
                for piece, span in zip(pieces, batch.spans):
                    self.assertEqual((span.first_row, span.count, span.start), (row, len(piece.tokens), piece.start))
                    self.assertEqual(len(span.context), span.end)  # nothing of what is reserved beyond the last token
                    row += span.count
                    self.assertEqual(list(span.context[span.start:]), batch.slots[span.first_row:row])
                    self.assertEqual(row - 1 in batch.logit_rows, piece.wants_logits)
                self.assertEqual(len(batch.logit_rows), sum(piece.wants_logits for piece in pieces))
                self.assertEqual((len(batch.spans), row), (len(pieces), len(rows)))
                self.assertEqual(batch.pieces(), pieces)
                self.assertEqual(Batch.of(map(tuple, pieces), page_size), batch)

    def test_without_pages_there_are_no_slots(self) -> None:
        pieces = [Piece([7], 0, (), True), Piece([8, 9], 0, (), False), Piece([5], 0, (3,), True)]
        batch = Batch.of(pieces, page_size=4)
        self.assertEqual((batch.tokens, batch.slots, batch.logit_rows), ([7, 8, 9, 5], [12], [0, 3]))
        self.assertEqual(batch.pieces(), pieces)


if __name__ == "__main__":
    unittest.main()
