"""M4, M6 · From an engine's settings to its page pool: how many pages there are, and the stores behind them."""

from __future__ import annotations

from collections.abc import Callable

from .errors import CapacityError
from .kv_cache import KVCacheManager
from .model import Model
from .schema import EngineSettings


def make_cache(model: Model, settings: EngineSettings,
               observer: Callable[[str, str, tuple[int, ...]], None]) -> KVCacheManager:
    """The pages for a model's keys and values and, for preemption by swap, the host's. CapacityError as below."""
    num_pages = settings.num_pages if settings.kv_budget_bytes is None else pages_within(
        settings.kv_budget_bytes, model, settings)
    host_pages = settings.host_pages if settings.preemption == "swap" else 0
    store, host_store = (model.new_store(pages, settings.page_size, settings.kv_quantization, host)
                         for pages, host in ((num_pages, False), (host_pages, True)))
    if reserve := getattr(store, "reserve_tails", None):
        reserve(min(num_pages, most_tails(settings)))
    return KVCacheManager(num_pages, settings.page_size, model.config.layers * model.config.kv_width,
                          settings.prefix_sharing, store, host_pages, host_store, observer)


def pages_within(budget: int, model: Model, settings: EngineSettings) -> int:
    """As many pages as fit in so many bytes. CapacityError if not one does.

    Int8 pages also have *tails* while they are being filled (``int8_pages.py``): ``most_tails``, or one for each page
    there is, if that is less.
    """
    page = model.new_store(1, settings.page_size, settings.kv_quantization)
    num_pages = max(budget // (page.page_bytes + page.tail_bytes),
                    (budget - most_tails(settings) * page.tail_bytes) // page.page_bytes)
    if num_pages < 1:
        raise CapacityError(f"kv_budget_bytes {budget} is less than one page of {settings.page_size} tokens "
                            f"({page.page_bytes + page.tail_bytes} bytes); give a larger budget")
    return num_pages


def most_tails(settings: EngineSettings) -> int:
    """Of int8 pages at a time: one for each running request, and one for each page that a step can begin besides. Two
    tokens of a request are enough for that, the last of one page and the first of the next; each further page of the
    same request takes page_size. What a budget pays for; samples that fork beyond max_running can have more."""
    crossing = min(settings.max_running, settings.budget_tokens // 2)
    return settings.max_running + crossing + (settings.budget_tokens - 2 * crossing) // settings.page_size
