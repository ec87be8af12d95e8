"""M3 · What a step of the scheduler decides, and how it says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from . import sequences


class ScheduledChunk(NamedTuple):
    """``count`` tokens of one request from position ``start`` on; phase "prefill" or "decode".

    The chunk that reaches the end of the known tokens yields the request's next token (its first, after a prompt).
    """

    request_id: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    phase: str


class Run(NamedTuple):
    """Chunks of equal length and phase: whose they are, and where each of them starts."""

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    count: int  # type: ignore[assignment]  # as above
    phase: str


@dataclass(slots=True)
class Chunks:
    """A step's chunks in runs. The decodes are one run, so two tuples, however many they are: that is quick to make,
    and little to keep for a timeline, which remembers many thousands of steps."""

    runs: list[Run] = field(default_factory=list)

    def add(self, request_ids: tuple[str, ...], starts: tuple[int, ...], count: int, phase: str) -> None:
        """One more run, behind the others."""
        self.runs.append(Run(request_ids, starts, count, phase))

    @property
    def tokens(self) -> int:
        """Of all chunks together. O(runs)."""
        return sum([len(starts) * count for _, starts, count, _ in self.runs])

    def __len__(self) -> int:
        return sum([len(starts) for _, starts, _, _ in self.runs])

    def __iter__(self) -> Iterator[ScheduledChunk]:
        for request_ids, starts, count, phase in self.runs:
            for request_id, start in zip(request_ids, starts):
                yield ScheduledChunk(request_id, start, count, phase)


class Reasons(Mapping[str, str]):
    """Why each request got what it got, by id. In most steps all requests decode, and in few of them somebody asks why:
    so that is put into words when somebody does."""

    __slots__ = ("_said", "_unsaid")

    def __init__(self, said: dict[str, str], chunks: Iterable[ScheduledChunk],
                 decoding: Sequence[sequences.Sequence]) -> None:
        """``said``: of those that do not decode."""
        self._said = said
        self._unsaid: tuple[Iterable[ScheduledChunk], Sequence[sequences.Sequence]] | None = (chunks, decoding)

    def _all(self) -> dict[str, str]:
        if unsaid := self._unsaid:
            chunks, decoding = unsaid
            starts = {chunk.request_id: chunk.start for chunk in chunks}
            self._said = {one.id: f"decodes position {starts[one.id]}: token {starts[one.id] - one.prompt_length + 2} "
                                  f"of at most {one.end - one.prompt_length}" for one in decoding} | self._said
            self._unsaid = None
        return self._said

    def __getitem__(self, request_id: str) -> str:
        return self._all()[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


class ScheduleDecision(NamedTuple):
    """What one step does. The tuples hold request ids; ``finished`` are those that ended since the last decision.

    ``running`` is in the order of admission, ``waiting`` in the order in which they began to wait (again, after a
    preemption). ``reasons`` says in words why each live request got what it got; of a long queue, those that the policy
    puts first. ``found`` are prompt tokens of admitted requests that shared pages already hold; coming back after a
    preemption does not count.
    """

    step: int
    budget_tokens: int
    planned: Chunks  # ``chunks``, in runs
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    why: Mapping[str, str]  # ``reasons``, not yet in words
    found: Mapping[str, int]

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """What is computed, in the order of the batch. O(requests) for each call."""
        return tuple(self.planned)

    @property
    def reasons(self) -> dict[str, str]:
        """One sentence for each request, by id. O(requests) for each call."""
        return dict(self.why)

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed in this step, never more than the budget."""
        return self.planned.tokens

    def __repr__(self) -> str:
        batch = " ".join(f"{chunk.request_id}+{chunk.count}" for chunk in self.planned)
        return (f"<ScheduleDecision: step {self.step}, {self.scheduled_tokens} of {self.budget_tokens} tokens: "
                f"{batch or 'nothing'}; {len(self.waiting)} wait>")

    def _repr_html_(self) -> str:
        from .notebook import schedule
        return schedule(self)


@dataclass(slots=True)
class Plan:
    """A decision in the making."""

    step: int
    budget: int
    left: int
    chunks: Chunks = field(default_factory=Chunks)
    decoding: list[sequences.Sequence] = field(default_factory=list)  # whose chunk is a decode
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of all others


def counted(number: int, noun: str) -> str:
    """ "1 page", "3 pages"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
