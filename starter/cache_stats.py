"""M2, M4 · What can be seen of a page manager from outside: of one page, and of all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageInfo:
    """What can be observed of a page: how many tables list it, whose they are, and "free", "used" or "cached"."""

    refcount: int
    users: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class CacheStats:
    """Counters since the manager was made, and the state of the pool now.

    allocations, releases   handles given out (forks included) and taken back
    hits, misses            tokens found already computed (shared prefixes and forks), and tokens that were computed
    copies, evictions       pages copied on write; cached pages whose content was given up for another use
    peak_pages, peak_bytes  the most pages in use at once, a shared page counted once
    internal_fragmentation  slots now reserved in used pages and holding no token, a shared page counted once
    swaps_out, swaps_in     tables moved to host pages and back
    peak_tail_bytes         the most held besides the pages, for those that were being filled (int8 pages)
    """

    allocations: int
    releases: int
    hits: int
    misses: int
    copies: int
    evictions: int
    peak_pages: int
    peak_bytes: int
    internal_fragmentation: int
    swaps_out: int = 0
    swaps_in: int = 0
    peak_tail_bytes: int = 0
