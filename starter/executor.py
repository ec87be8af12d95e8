"""M3 · Runs the decoder for one step, and keeps a failure with the request that caused it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

from .backend import KVStore
from .batch import Batch, Piece
from .faults import FaultInjector
from .model import Model

Logits = Sequence[float]
Row = Union[Logits, Exception]


class Executor:
    """Computes pieces (``batch.py``) against the pages in ``store``; without a store, without a cache."""

    def __init__(self, model: Model, store: KVStore | None, page_size: int) -> None:
        self._model, self._store, self._page_size = model, store, page_size
        self.faults: FaultInjector | None = None

    def run(self, pieces: Mapping[str, Piece]) -> dict[str, Row]:
        """Logits for each sequence whose next token is due; an exception for each one that failed.

        When the batch fails, each sequence is tried alone (its slots are simply written again, with the same
        numbers), so that only those at fault end. This relies on batch-equals-solo, and on stores that keep whatever
        a second time needs until the page manager settles a page.
        """
        try:
            return self._forward(pieces)
        except Exception:
            alone = pieces.items()  # tried below, where no traceback holds what the whole batch took of a device
        rows: dict[str, Row] = {}
        for sequence_id, piece in alone:
            try:
                rows.update(self._forward({sequence_id: piece}))
            except Exception as error:
                rows[sequence_id] = error.with_traceback(None)  # nor what this one took
        return rows

    def _forward(self, pieces: Mapping[str, Piece]) -> dict[str, Row]:
        if not pieces:
            return {}
        if self.faults:
            self.faults.before_forward(pieces.keys())
        wanted = [sequence_id for sequence_id, piece in pieces.items() if piece.wants_logits]
        rows: dict[str, Logits]
        if self._store is None:
            rows = {sequence_id: self._model.forward_uncached(pieces[sequence_id].tokens) for sequence_id in wanted}
        else:
            batch = Batch.of(pieces.values(), self._page_size)
            rows = dict(zip(wanted, self._model.forward(batch, self._store)))
        return dict(self.faults.after_forward(rows) if self.faults else rows)
