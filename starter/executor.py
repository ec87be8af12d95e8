"""M3 · Runs the decoder for one step, and keeps a failure with the request that caused it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from .backend import KVStore
from .batch import Batch
from .faults import FaultInjector
from .model import Model
from .streams import Sample

Row = Union[Sequence[float], Exception]  # of logits


class Executor:
    """Computes batches (``batch.py``) against the pages in ``store``; without a store, each piece whole by itself."""

    def __init__(self, model: Model, store: KVStore | None) -> None:
        self._model, self._store = model, store
        self.faults: FaultInjector | None = None

    def run(self, samples: Sequence[Sample], batch: Batch) -> dict[Sample, Row]:
        """Logits for each sample whose next token is due; an exception for each one that failed. ``batch`` holds one
        piece for each of the samples.

        When the batch fails, each sample is tried alone (its slots are simply written again, with the same
        numbers), so that only those at fault end. This relies on batch-equals-solo, and on stores that keep whatever
        a second time needs until the page manager settles a page.
        """
        try:
            return self._forward(samples, batch)
        except Exception:
            alone = batch.pieces()  # tried below, where no traceback holds what the whole batch took of a device
        rows: dict[Sample, Row] = {}
        for sample, piece in zip(samples, alone):
            try:
                rows.update(self._forward([sample], Batch.of([piece], batch.page_size)))
            except Exception as error:
                rows[sample] = error.with_traceback(None)  # nor what this one took
        return rows

    def _forward(self, samples: Sequence[Sample], batch: Batch) -> dict[Sample, Row]:
        if not samples:
            return {}
        if self.faults:
            self.faults.before_forward({sample.id for sample in samples})
        rows: Sequence[Sequence[float]]
        if self._store is None:
            rows = [self._model.forward_uncached(piece.tokens) for piece in batch.pieces() if piece.wants_logits]
        else:
            rows = self._model.forward(batch, self._store)
        wanted = samples
        if len(batch.logit_rows) < len(samples):  # some prompts are not at their end yet
            wanted = [sample for sample, piece in zip(samples, batch.pieces()) if piece.wants_logits]
        if self.faults:
            rows = self.faults.after_forward([sample.id for sample in wanted], rows)
        return dict(zip(wanted, rows))
