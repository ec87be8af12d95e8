"""What can go wrong on purpose, as a scenario or code asks for it; ``workloads/faults.py`` makes it happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from starter.base.strict_json import Integer, Nullable, Record, Tagged, Text
from starter.errors import RequestError

HOLDER = "(memory cut)"  # the name under which memory cuts hold pages


@dataclass(frozen=True)
class BackendFault:
    """The decoder raises at its ``call``-th call; with a request_id, at every later call that computes this request.

    The engine answers by computing each request alone: a fault without a request_id costs a retry and nobody's life.
    """

    call: int
    request_id: str | None = None


@dataclass(frozen=True)
class NanLogits:
    """The ``call``-th call returns NaN for this request, or, without a request_id, for all."""

    call: int
    request_id: str | None = None


@dataclass(frozen=True)
class RefusedPages:
    """The ``ask``-th request for fresh pages is refused as if none were free."""

    ask: int


@dataclass(frozen=True)
class AbnormalRelease:
    """Before step ``step`` somebody outside releases the pages of a running request."""

    step: int
    request_id: str


@dataclass(frozen=True)
class MemoryCut:
    """From step ``step`` to step ``until`` somebody outside holds ``pages`` pages, or as many of them as are free."""

    step: int
    pages: int
    until: int

    def __post_init__(self) -> None:
        if self.until <= self.step:
            raise RequestError(f"until must be after step {self.step}, not {self.until}")


@dataclass(frozen=True)
class SlowConsumer:
    """Nobody reads this request's stream until everything else has ended: ``play.play`` does the not reading, and the
    timeline shows nothing of it."""

    request_id: str


Fault = Union[BackendFault, NanLogits, RefusedPages, AbnormalRelease, MemoryCut, SlowConsumer]

ID_SHAPE = Text(1, 200)

FAULT_SHAPE = Tagged("kind", {
    "backend": Record(BackendFault, {"call": Integer(), "request_id": Nullable(ID_SHAPE)}),
    "nan_logits": Record(NanLogits, {"call": Integer(), "request_id": Nullable(ID_SHAPE)}),
    "refused_pages": Record(RefusedPages, {"ask": Integer()}),
    "abnormal_release": Record(AbnormalRelease, {"step": Integer(), "request_id": ID_SHAPE}),
    "memory_cut": Record(MemoryCut, {"step": Integer(), "pages": Integer(1), "until": Integer(1)}),
    "slow_consumer": Record(SlowConsumer, {"request_id": ID_SHAPE}),
})
