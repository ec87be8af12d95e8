"""M6 · What an audit keeps of a request, from its submit to its end, and how long the request may wait.

Two bounds hold. The *work in front* is the run's own: a step in which a request waits computes at least one token of a
request that runs, unless nothing can run in it. So apart from such steps the request waits no longer than those who run
meanwhile have tokens to compute: what is left of prompt and max_tokens, and all of it for those who are admitted, or
admitted again, meanwhile. Nothing is assumed of the policy.

The other is the one that ``scheduler.py`` promises before any request is known: behind k requests a request waits at
most (k + 1) * (BYPASS_LIMIT + 2) * L * ceil(max_running / budget) steps, and AGING + 1 times as many under
"prefill-first". L is the largest number of prompt and output tokens of any request that is live meanwhile. The audit is
generous: k counts every request that could ever go first, L every request that was ever live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from starter.scheduler import BYPASS_LIMIT
from starter.schema import Request


@dataclass(eq=False)
class RequestRecord:
    """A live request, or a further sample of one."""

    request: Request
    family: str  # id of the request that it is a sample of
    tokens: list[int]  # the prompt and what was generated
    serial: int  # order of submission
    arrival: int  # steps planned before it
    rank: float
    computed: int = 0
    generated: int = 0
    running: bool = False
    due: bool = False  # the last completed step has computed its next token
    cancelled: bool = False
    cancelled_at_token: bool = False  # right after a token of its own, which may have been its last
    waited: int = 0  # steps since it began to wait; meanwhile:
    ahead: int = 0  # k
    longest: int = 0  # L
    turns: int = 1  # by which a small budget, or a policy that lets prompts go first, multiplies the wait
    work: int = 0  # tokens that those who ran meanwhile had left to compute when it began, or when they began

    @property
    def order(self) -> tuple[float, int]:
        """Smaller is served first."""
        return self.rank, self.serial

    @property
    def length(self) -> int:
        """Prompt and output tokens."""
        return len(self.request.prompt_tokens) + self.request.max_tokens

    @property
    def bound(self) -> int:
        """Steps that it may wait."""
        return (self.ahead + 1) * (BYPASS_LIMIT + 2) * self.longest * self.turns

    def begin_to_wait(self, live: Iterable[RequestRecord]) -> None:
        """It is new, or was preempted: it waits behind some of the live requests, and some of them wait behind it."""
        self.waited, self.turns, self.ahead, self.longest, self.work = 0, 1, 0, self.length, 0
        for other in live:
            if other is not self:
                self.ahead += other.order < self.order
                other.ahead += self.order < other.order
                self.longest, other.longest = max(self.longest, other.length), max(other.longest, self.length)
                self.work += (other.length - other.computed) * other.running

    def begin_to_run(self, live: Iterable[RequestRecord]) -> None:
        """Those that wait may have to wait for all that it computes: its whole length, as its pages may be gone."""
        for other in live:
            if not other.running:
                other.work += self.length

    def wait(self, turns: int, idle: bool) -> None:
        """Wait for one more step, which serves it only every ``turns``-th time; ``idle``: nothing was computed in
        it."""
        self.waited += 1
        self.work += idle
        self.turns = max(self.turns, turns)
