"""M3 · Runs the decoder for one step, and keeps a failure with the request that caused it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

from .backend import KVStore
from .batch import Batch, Piece
from .faults import FaultInjector
from .model import Model
from .streams import Sample

Row = Union[Sequence[float], Exception]  # of logits


class Executor:
    """Computes pieces (``batch.py``) against the pages in ``store``; without a store, without a cache."""

    def __init__(self, model: Model, store: KVStore | None, page_size: int) -> None:
        self._model, self._store, self._page_size = model, store, page_size
        self.faults: FaultInjector | None = None

    def run(self, pieces: Mapping[Sample, Piece]) -> dict[Sample, Row]:
        """Logits for each sample whose next token is due; an exception for each one that failed.

        When the batch fails, each sample is tried alone (its slots are simply written again, with the same
        numbers), so that only those at fault end. This relies on batch-equals-solo, and on stores that keep whatever
        a second time needs until the page manager settles a page.
        """
        try:
            return self._forward(pieces)
        except Exception:
            alone = pieces.items()  # tried below, where no traceback holds what the whole batch took of a device
        rows: dict[Sample, Row] = {}
        for sample, piece in alone:
            try:
                rows.update(self._forward({sample: piece}))
            except Exception as error:
                rows[sample] = error.with_traceback(None)  # nor what this one took
        return rows

    def _forward(self, pieces: Mapping[Sample, Piece]) -> dict[Sample, Row]:
        if not pieces:
            return {}
        if self.faults:
            self.faults.before_forward({sample.id for sample in pieces})
        wanted = [sample for sample, piece in pieces.items() if piece.wants_logits]
        rows: Sequence[Sequence[float]]
        if self._store is None:
            rows = [self._model.forward_uncached(pieces[sample].tokens) for sample in wanted]
        else:
            rows = self._model.forward(Batch.of(pieces.values(), self._page_size), self._store)
        if self.faults:
            rows = self.faults.after_forward([sample.id for sample in wanted], rows)
        return dict(zip(wanted, rows))
