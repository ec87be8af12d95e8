"""M3 · A live request: what the scheduler counts of it, what has been generated, and the events that wait to be read.

    Request ──submit──▶ RequestStream     one for each request: its samples, and the queue of its unread events
                          └─ Sample ...   one for each continuation of the prompt (``SamplingParams.n``): its text
                               is a SequenceState, which is all that the scheduler knows of it
                                 └─ KVHandle, its block table

The scheduler counts (``known``, ``computed``) and decides when a sequence has all its tokens; the engine appends the
tokens and decides everything else that ends a sample. The first sample's sequence has the request's id, the i-th
"<request>#<i>".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field, replace
from operator import attrgetter

from .base.tokenizer import TextStream
from .kv_cache import KVHandle
from .sampling import Choice, Draws, StopStrings
from .schema import Request, TokenEvent, sample_id

_order = attrgetter("order")


@dataclass(eq=False, repr=False, slots=True)
class SequenceState:
    """A live sequence (a request, or one of its samples): how much of it is known, computed and stored."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # the prompt, then what is appended by whoever samples the tokens
    arrival_step: int = 0
    order: tuple[float, int] = (0.0, 0)  # the policy's rank, then the order of submission
    known: int = 0  # prompt plus generated tokens, counted by the scheduler
    computed: int = 0  # of these, tokens whose keys and values were computed
    handle: KVHandle | None = None  # of its block table, while it is running or swapped out
    preempted: bool = False  # at least once
    swapped: bool = False  # its tokens are in host pages
    last_served: int = -1  # step of its last chunk
    bypassed: int = 0  # later requests that were admitted while this one lacked pages
    refusals: int = 0  # times it got no pages although no other request was running
    id: str = ""  # the request's
    prompt_length: int = 0

    def __post_init__(self) -> None:
        self.id = self.request.request_id
        self.tokens = self.tokens or list(self.request.prompt_tokens)
        self.known = self.prompt_length = len(self.request.prompt_tokens)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}: {self.computed} of {self.known} tokens computed>"

    @property
    def generated(self) -> int:
        """Tokens generated so far, as the scheduler counts them."""
        return self.known - self.prompt_length

    @property
    def remaining(self) -> int:
        """Known tokens still to be computed; the last of them yields the next token."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        """The prompt is computed, and of what was generated all but the newest token."""
        return self.prompt_length <= self.computed == self.known - 1


class WaitingQueue:
    """Waiting sequences, sorted by ``order``. ``push`` and ``remove`` search in O(log n) and move O(n) pointers."""

    def __init__(self) -> None:
        self._sorted: list[SequenceState] = []
        self._by_id: dict[str, SequenceState] = {}  # in the order in which they began to wait
        self._ids: tuple[str, ...] | None = ()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> SequenceState | None:
        return self._by_id.get(request_id)

    def push(self, sequence: SequenceState) -> None:
        insort(self._sorted, sequence, key=_order)
        self._by_id[sequence.id] = sequence
        self._ids = None

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence; nothing happens if this very object does not wait."""
        if self.get(sequence.id) is sequence:
            self._ids = None
            del self._by_id[sequence.id]
            del self._sorted[self._sorted.index(sequence, bisect_left(self._sorted, sequence.order, key=_order))]

    def first(self, number: int) -> list[SequenceState]:
        """The first ``number`` in order; they stay."""
        return self._sorted[:number]

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in the order in which the sequences began to wait. O(1) unless the queue has changed since the last
        call."""
        if self._ids is None:
            self._ids = tuple(self._by_id)
        return self._ids


# ------------------------------------------------------------------------------------------------- what is generated


class Sample(SequenceState):
    """One continuation of a request's prompt: a sequence with its text, its random numbers and its end."""

    __slots__ = ("_stops", "_text", "draws", "finish_reason", "number", "others", "started", "stream", "withheld")

    def __init__(self, stream: RequestStream, number: int, draws: Draws, text: TextStream) -> None:
        request, name = stream.request, sample_id(stream.request.request_id, number)
        super().__init__(replace(request, request_id=name) if number else request)
        self.stream, self.number, self.draws = stream, number, draws
        self.others: list[Sample] = []  # first sample only: those to fork once its prompt is computed
        self.started = False  # its beginning is in the timeline: at submit, or when it was forked
        self.withheld = 0  # tokens that a cancel withdrew before they were read
        self.finish_reason: str | None = None
        self._text, self._stops = text, StopStrings(request.sampling.stop)
        for token in request.prompt_tokens:  # decoding continues from the prompt, whose text is not repeated
            text.push(token)

    @property
    def plain(self) -> bool:
        """Greedy, and only the likeliest token matters."""
        return self.request.sampling.plain

    @property
    def delivered(self) -> int:
        """Tokens in the stream so far, which is the index of the next one."""
        return len(self.tokens) - self.prompt_length

    def add(self, choice: Choice, complete: bool, step: int, time: float) -> TokenEvent:
        """Append a generated token to tokens, text and stream. The sample ends with it if it is ``complete`` (it has
        max_tokens tokens), if the token is an end-of-sequence or stop token, or if the text holds a stop string."""
        token, logprob, top_logprobs = choice
        index, sampling, stopped = self.delivered, self.request.sampling, False
        self.tokens.append(token)
        self.draws.accept()
        text = self._text.push(token)
        if sampling.stop and index >= sampling.min_tokens:
            text, stopped = self._stops.push(text)
        if stopped or token in self.stream.end_tokens:
            self.finish_reason = "stop"
        elif complete:
            self.finish_reason = "length"
        if self.finish_reason and not stopped:
            text += self._rest()
        return self._append(index, token, text, step, time, logprob, None, top_logprobs)

    def end(self, reason: str, error: str | None, step: int, time: float) -> TokenEvent:
        """End the sample without a token; the event's index is the next one that its reader expects."""
        self.finish_reason = reason
        text = "" if reason == "cancelled" else self._rest()
        return self._append(self.delivered - self.withheld, None, text, step, time, None, error, ())

    def _append(self, index: int, token: int | None, text: str, step: int, time: float, logprob: float | None,
                error: str | None, top_logprobs: tuple[tuple[int, float], ...]) -> TokenEvent:
        event = TokenEvent(self.stream.request.request_id, index, token, text, step, time, logprob, self.finish_reason,
                           error, self.number, top_logprobs)
        self.stream.events.append(event)
        return event

    def _rest(self) -> str:
        """Text that was held back: an incomplete character, or what might have become a stop string."""
        text, stopped = self._stops.push(self._text.finish())
        return text if stopped else text + self._stops.finish()


@dataclass(eq=False, slots=True)
class RequestStream:
    """The events of a request: appended at the end, and read from the front, each once. It ends with its last
    sample."""

    request: Request
    end_tokens: tuple[int, ...] = ()  # end a sample
    samples: list[Sample] = field(default_factory=list)
    events: deque[TokenEvent] = field(default_factory=deque)  # not read yet

    @property
    def finish_reason(self) -> str | None:
        """Once all samples are finished: "cancelled" or "error" if one of them ended so, else that of the last."""
        reasons = [sample.finish_reason for sample in self.samples]
        if None in reasons:
            return None
        return next((reason for reason in ("cancelled", "error") if reason in reasons), reasons[-1])

    @property
    def drained(self) -> bool:
        """The last event was read."""
        return not self.events and self.finish_reason is not None

    def withhold(self) -> None:
        """Forget unread tokens, which must not be seen after a cancel. Those of samples that were finished before
        stay."""
        unread, self.events = self.events, deque()
        for event in unread:
            sample = self.samples[event.sample]
            if sample.finish_reason is None:
                sample.withheld += 1
            else:
                self.events.append(event)


@dataclass(frozen=True)
class RequestStatus:
    """State of a request, "waiting", "running" or "finished", and its progress (all samples together)."""

    request_id: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str | None = None
