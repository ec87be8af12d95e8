"""The model runner: logits for those whose next token is due, and a failure for whoever caused it alone."""

from __future__ import annotations

import unittest
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from starter.backend import Batch, Piece
from starter.core import ModelRunner, Outcome
from starter.errors import BackendError


@dataclass(frozen=True)
class Named:
    """A sample, as far as a runner asks."""

    id: str


class _Scratch(set[int]):
    """Memory that can be seen to be gone."""


class _Sums:
    """A model whose logits are the sum of a piece's tokens; token 7 cannot be computed."""

    def __init__(self) -> None:
        self.computed: list[list[int]] = []

    def forward(self, batch: Batch, store: object) -> list[list[float]]:
        self.computed.append(batch.tokens)
        if 7 in batch.tokens:
            raise BackendError("7 is too much")
        return [[float(sum(piece.tokens[:len(piece.tokens) - left]))] for piece in batch.pieces()
                for left in reversed(range(piece.wants_logits))]

    def forward_uncached(self, tokens: Sequence[int]) -> list[float]:
        self.computed.append(list(tokens))
        return [float(sum(tokens))]


def run(model: object, pieces: Sequence[Piece], store: object) -> dict[str, Outcome]:
    """Of samples that are named a, b, c, ..."""
    runner: ModelRunner = ModelRunner(model, store)  # type: ignore[arg-type]
    rows = runner.run([Named(name) for name in "abcdefgh"[:len(pieces)]], Batch.of(pieces, page_size=4))
    return {named.id: row for named, row in rows.items()}


class ModelRunnerTest(unittest.TestCase):
    def test_only_those_whose_next_token_is_due_have_logits(self) -> None:
        pieces = [Piece([1, 2], 0, (0,), False), Piece([3], 4, (1, 2), True), Piece([4, 5], 0, (3,), False),
                  Piece([6], 0, (4,), True)]
        model = _Sums()
        self.assertEqual(run(model, pieces, object()), {"b": [[3.0]], "d": [[6.0]]})
        self.assertEqual(model.computed, [[1, 2, 3, 4, 5, 6]])

    def test_without_a_store_only_those_are_computed(self) -> None:
        pieces = [Piece([1, 2], 0, (), False), Piece([3], 0, (), True), Piece([4, 5], 0, (), True)]
        model = _Sums()
        self.assertEqual(run(model, pieces, None), {"b": [[3.0]], "c": [[9.0]]})
        self.assertEqual(model.computed, [[3], [4, 5]])

    def test_a_prompt_may_want_several_rows(self) -> None:
        """With pages and without, and when each piece is tried alone."""
        pieces = [Piece([1, 2, 4], 0, (0,), 3), Piece([3, 5], 0, (1,), 0), Piece([6, 1], 0, (2,), 2)]
        expected = {"a": [[1.0], [3.0], [7.0]], "c": [[6.0], [7.0]]}
        for store in (object(), None):
            self.assertEqual(run(_Sums(), pieces, store), expected)
        failed = run(_Sums(), [*pieces, Piece([7], 0, (3,), 1)], object())
        self.assertEqual(str(failed.pop("d")), "7 is too much")
        self.assertEqual(failed, expected)

    def test_nothing_to_do(self) -> None:
        model = _Sums()
        self.assertEqual((run(model, [], object()), model.computed), ({}, []))

    def test_a_failure_stays_with_whoever_caused_it(self) -> None:
        """Also with one whose logits are not yet wanted."""
        pieces = [Piece([1], 0, (0,), True), Piece([7, 2], 0, (1,), False), Piece([3], 5, (2, 3), False),
                  Piece([4], 0, (4,), True)]
        rows = run(_Sums(), pieces, object())
        self.assertEqual({name: str(row) for name, row in rows.items()},
                         {"a": "[[1.0]]", "b": "7 is too much", "d": "[[4.0]]"})

    def test_what_a_failed_try_has_taken_is_free_before_the_next(self) -> None:
        """A device out of memory for all together, and for one of them: the others have all of it."""
        taken: list[weakref.ref[_Scratch]] = []

        class Device:
            def forward(self, batch: Batch, store: object) -> list[list[float]]:
                held = sum(ref() is not None for ref in taken)
                scratch = _Scratch(batch.tokens)
                taken.append(weakref.ref(scratch))
                if held or len(batch.spans) > 1 or 7 in scratch:
                    raise BackendError(f"out of memory, {held} held")
                return [[1.0]]

        rows = run(Device(), [Piece([token], 0, (token,), True) for token in (1, 7, 2, 3)], object())
        self.assertEqual({name: str(row) for name, row in rows.items()},
                         {"a": "[[1.0]]", "b": "out of memory, 0 held", "c": "[[1.0]]", "d": "[[1.0]]"})


if __name__ == "__main__":
    unittest.main()
