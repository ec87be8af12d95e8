"""M3, M4 · What the scheduler does with a sequence's block table: open, reserve, fill, share, swap out and in, close.

A scheduler without a page manager counts tokens alone: every call succeeds then and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens

from .decisions import counted
from .kv_cache import KVCacheManager
from .sequences import Sequence


class BlockTables:
    """``tokens_of(request_id)`` gives the known tokens, for prefix sharing; ``swaps``: are host pages to be used?"""

    def __init__(self, kv: KVCacheManager | None, swaps: bool, tokens_of: Callable[[str], Tokens[int]]) -> None:
        self._kv, self._swaps, self._tokens_of = kv, swaps, tokens_of

    def open(self, sequence: Sequence) -> None:
        """Pages for a waiting sequence: its swapped ones brought back, or new ones behind a shared prefix, whose tokens
        count as computed. OutOfPagesError changes nothing."""
        if not self._kv:
            return
        if sequence.swapped and sequence.handle:
            self._kv.swap_in(sequence.handle, sequence.known)
            sequence.swapped = False
        else:
            tokens = self._tokens_of(sequence.id) if self._kv.prefix_sharing else None
            sequence.handle = self._kv.allocate(sequence.id, sequence.known, tokens, sequence.request.cache_salt)
            sequence.computed = self._kv.length(sequence.handle)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child starts on its parent's pages."""
        if self._kv and parent.handle:
            child.handle = self._kv.fork(parent.handle, child.id)

    def lacking(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of the sequences that have to ``reserve``: few of them, while no page is shared and may have to be
        copied."""
        if not self._kv:
            return []
        if self._kv.sharing:
            return sequences
        page_size = self._kv.page_size
        return [sequence for sequence in sequences
                if not sequence.handle or sequence.known > len(sequence.handle.pages) * page_size]

    def reserve(self, sequence: Sequence) -> None:
        """Make all known positions writable. OutOfPagesError changes nothing."""
        if self._kv and sequence.handle:
            self._kv.reserve(sequence.handle, sequence.known)

    def fill(self, sequence: Sequence) -> None:
        """The computed positions hold keys and values now."""
        if self._kv and sequence.handle:
            tokens = self._tokens_of(sequence.id) if self._kv.prefix_sharing else None
            self._kv.commit(sequence.handle, sequence.computed, tokens)

    def swap_out(self, sequence: Sequence) -> bool:
        """Move the tokens to host pages; False where that is not asked for, or cannot be done."""
        if not self._swaps or not self._kv or not sequence.handle:
            return False
        try:
            self._kv.swap_out(sequence.handle)
        except Exception:  # full, taken away from outside, not to be copied: computing again is always right
            return False
        sequence.swapped = True
        return True

    def close(self, sequence: Sequence) -> None:
        """Give the pages back, unless somebody outside already has."""
        if self._kv and sequence.handle and self._kv.owns(sequence.handle):
            self._kv.release(sequence.handle)
        sequence.handle, sequence.swapped = None, False

    def lack(self, sequence: Sequence) -> str:
        """What its opening needs and what there is, in words."""
        if not self._kv:
            return ""
        return f"needs {counted(self._kv.pages_for(sequence.known), 'page')}, {self._kv.free_pages} free"

    def page_count(self, sequence: Sequence) -> int:
        """Pages in the table now."""
        if self._kv and sequence.handle and self._kv.owns(sequence.handle):
            return len(self._kv.pages(sequence.handle))
        return 0
