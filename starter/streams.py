"""M3 · A request from submit until its last event was read: its samples, their tokens and text, the unread events.

A request has one sample, or n of them (``SamplingParams.n``). A sample is what the scheduler calls a sequence: the
first has the request's id, the i-th the id "<request>#<i>". All share one queue of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .logits import Choice
from .requests import Request, TokenEvent, TokenFields, sample_id
from .sampling import Draws
from .stop_strings import StopStrings
from .tokenizer import TextStream


@dataclass(frozen=True)
class RequestStatus:
    """Where a request stands: "waiting", "running" or "finished", and how far it is (all samples together)."""

    request_id: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str | None = None


@dataclass(eq=False, slots=True)
class Sample:
    """One continuation of a request's prompt."""

    stream: RequestStream
    number: int
    draws: Draws
    decoder: TextStream
    stops: StopStrings | None  # None: there are none to watch for
    tokens: list[int]  # the prompt and what was generated
    started: bool = False  # the first runs from submit on, the others when the prompt is computed
    others: Sequence[Sample] = ()  # of the first one: those that start with it, once the prompt is computed
    withheld: int = 0  # tokens generated, but not read before a cancel
    finish_reason: str | None = None
    id: str = field(init=False)  # the sequence's
    request_id: str = field(init=False)  # this and the next are the stream's, kept here for every token to ask
    prompt_length: int = field(init=False)
    max_tokens: int = field(init=False)
    plain: bool = field(init=False)
    end_tokens: tuple[int, ...] = field(init=False)
    events: deque[TokenFields] = field(init=False)

    def __post_init__(self) -> None:
        request = self.stream.request
        self.request_id, self.id = request.request_id, sample_id(request.request_id, self.number)
        self.prompt_length, self.max_tokens = len(request.prompt_tokens), request.max_tokens
        self.plain = request.sampling.plain
        self.end_tokens, self.events = self.stream.end_tokens, self.stream.events

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    def add(self, choice: Choice, step: int, time: float) -> TokenFields:
        """Append a generated token, and decide whether the sample is finished."""
        token, logprob, top_logprobs = choice
        index, stopped = len(self.tokens) - self.prompt_length, False
        self.tokens.append(token)
        text = self.decoder.push(token)
        if not self.plain:
            self.draws.accept()
        if self.stops and index >= self.stream.request.sampling.min_tokens:
            text, stopped = self.stops.push(text)
        reason = ("stop" if stopped or token in self.end_tokens else
                  "length" if index + 1 == self.max_tokens else None)
        if reason and not stopped:
            text += self._rest()
        event = (self.request_id, index, token, text, step, time, logprob, reason, None, self.number, top_logprobs)
        self.events.append(event)
        self.finish_reason = reason
        return event

    def end(self, reason: str, error: str | None, step: int, time: float) -> TokenEvent:
        """Append the end of a sample that ends without a token; its index is the next one its reader expects."""
        text = "" if reason == "cancelled" else self._rest()
        event = TokenEvent(self.request_id, self.generated - self.withheld, None, text, step, time, None,
                           reason, error, self.number)
        self.events.append(event)
        self.finish_reason = reason
        return event

    def _rest(self) -> str:
        """Text held back: an incomplete character, or what might have become a stop string."""
        rest = self.decoder.finish()
        if not self.stops:
            return rest
        text, stopped = self.stops.push(rest)
        return text if stopped else text + self.stops.finish()


@dataclass(eq=False, slots=True)
class RequestStream:
    """Events go in at the end and are read, each once, from the front. The stream ends with its last sample."""

    request: Request
    end_tokens: tuple[int, ...] = ()  # which end a sample
    samples: list[Sample] = field(default_factory=list)
    events: deque[TokenFields] = field(default_factory=deque)  # not yet read

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

    @property
    def unread(self) -> list[TokenEvent]:
        """The events, by their names. O(events)."""
        return list(map(TokenEvent._make, self.events))

    def withhold(self) -> None:
        """Forget unread tokens: after a cancel nobody sees them. Ends of samples that were finished before stay."""
        kept: list[TokenEvent] = []
        for event in self.unread:
            sample = self.samples[event.sample]
            if sample.finish_reason is None:
                sample.withheld += 1
            else:
                kept.append(event)
        self.events.clear()
        self.events.extend(kept)
