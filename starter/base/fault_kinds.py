"""The faults that a scenario, or code, can ask for, and their hooks; ``workloads/faults.py`` makes them happen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, Union

from starter.base.strict_json import Integer, Nullable, Record, Tagged, Text
from starter.errors import RequestError

HOLDER = "(memory cut)"  # the name under which memory cuts hold pages
ID_SHAPE = Text(1, 200)


@dataclass(frozen=True)
class BackendFault:
    """The decoder raises at its ``call``-th call; with a request_id, at every later call that computes this request.

    The engine then computes each request alone: a fault without a request_id costs a retry, and no request fails.
    """

    call: Annotated[int, Integer()]
    request_id: Annotated[str | None, Nullable(ID_SHAPE)] = None


@dataclass(frozen=True)
class NanLogits:
    """The ``call``-th call returns NaN for this request, or, without a request_id, for all."""

    call: Annotated[int, Integer()]
    request_id: Annotated[str | None, Nullable(ID_SHAPE)] = None


@dataclass(frozen=True)
class RefusedPages:
    """The ``ask``-th request for fresh pages is refused as if none were free."""

    ask: Annotated[int, Integer()]


@dataclass(frozen=True)
class AbnormalRelease:
    """Before step ``step`` the pages of a running request are released behind the engine's back."""

    step: Annotated[int, Integer()]
    request_id: Annotated[str, ID_SHAPE]


@dataclass(frozen=True)
class MemoryCut:
    """From step ``step`` to step ``until`` the pool lacks ``pages`` pages, or as many of them as are free."""

    step: Annotated[int, Integer()]
    pages: Annotated[int, Integer(1)]
    until: Annotated[int, Integer(1)]

    def __post_init__(self) -> None:
        if self.until <= self.step:
            raise RequestError(f"until must be after step {self.step}, not {self.until}")


@dataclass(frozen=True)
class SlowConsumer:
    """The stream of this request stays unread until all others have ended. ``play`` sees to that; the timeline does
    not show it."""

    request_id: Annotated[str, ID_SHAPE]


Fault = Union[BackendFault, NanLogits, RefusedPages, AbnormalRelease, MemoryCut, SlowConsumer]

FAULT_SHAPE = Tagged("kind", {
    "backend": Record.of(BackendFault), "nan_logits": Record.of(NanLogits), "refused_pages": Record.of(RefusedPages),
    "abnormal_release": Record.of(AbnormalRelease), "memory_cut": Record.of(MemoryCut),
    "slow_consumer": Record.of(SlowConsumer),
})


# --------------------------------------------------------------------------------------------- where they strike


class FaultHooks(Protocol):
    """Where faults can be injected; implemented by ``workloads/faults.py``."""

    slow: frozenset[str]  # requests whose streams are not read until the end

    def before_step(self) -> None: ...

    def before_forward(self, request_ids: Collection[str]) -> None: ...

    def after_forward(self, request_ids: Sequence[str],
                      rows: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]: ...

    def end(self) -> None: ...
