"""M3 · From a decision to the decoder's batch: which sample computes which tokens, and where its pages are.

    decision.planned ──chunks──▶ samples, batch        a piece for each chunk, in their order

A request whose pages do not reach as far as its chunk fails here, alone: somebody outside has taken them, or they were
never reserved. Without a cache there are no pages, and all tokens are computed each time one is due.
"""

from __future__ import annotations

from collections.abc import Iterator

from .batch import Batch, PlainPiece
from .decisions import Chunks
from .errors import EngineError
from .kv_cache import KVCacheManager, KVHandle
from .request_table import RequestTable
from .scheduler import ContinuousBatchScheduler
from .streams import Sample


class Layout:
    """Lays the chunks of a step flat. The engine holds its lock around every call, but not while the batch is computed:
    so tokens are copied."""

    def __init__(self, requests: RequestTable, scheduler: ContinuousBatchScheduler, kv: KVCacheManager,
                 use_cache: bool) -> None:
        self._requests, self._scheduler, self._kv, self._use_cache = requests, scheduler, kv, use_cache

    def batch(self, chunks: Chunks) -> tuple[list[Sample], Batch]:
        """The samples that compute something, and what they compute: a piece for each of them. O(tokens)."""
        samples: list[Sample] = []
        pieces = self._pieces(chunks, samples) if self._use_cache else self._whole_pieces(chunks, samples)
        return samples, Batch.of(pieces, self._kv.page_size)

    def _pieces(self, chunks: Chunks, found: list[Sample]) -> Iterator[PlainPiece]:
        """A piece for each chunk, its sample noted in ``found``."""
        samples, page_size = self._requests.samples, self._kv.page_size
        for sequence_ids, starts, count, _ in chunks.runs:
            for sequence_id, start, handle in zip(sequence_ids, starts, self._scheduler.handles(sequence_ids)):
                end, pages = start + count, handle.pages
                if end > len(pages) * page_size:
                    self._scheduler.fail(sequence_id, self._no_room(handle, end))
                    continue
                sample = samples[sequence_id]
                tokens = sample.tokens
                found.append(sample)
                yield tokens[start:end], start, pages, end == len(tokens)

    def _no_room(self, handle: KVHandle, end: int) -> EngineError:
        """Why a request's pages do not hold the positions before ``end``."""
        try:
            pages = self._kv.resident_pages(handle)
        except EngineError as error:  # released or swapped out from outside
            return error
        return EngineError(f"{handle.request_id} is to compute position {end - 1}, and its {len(pages)} pages of "
                           f"{self._kv.page_size} end before it: they were not reserved, or are not its own any more")

    def _whole_pieces(self, chunks: Chunks, found: list[Sample]) -> Iterator[PlainPiece]:
        """Without a cache: all tokens, to be computed only when the next one is due."""
        for sequence_id, start, count, _ in chunks:
            sample = self._requests.samples[sequence_id]
            found.append(sample)
            yield sample.tokens[:], 0, (), start + count == len(sample.tokens)

    def positions(self, batch: Batch) -> int:
        """How many positions a step sends through the decoder."""
        if self._use_cache:
            return len(batch.tokens)
        return sum(len(piece.tokens) for piece in batch.pieces() if piece.wants_logits)
