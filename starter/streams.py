"""M3 · A request from submit until its last event was read: its tokens, its generator, its unread events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from .schema import Request, TokenEvent
from .tokenizer import TextStream


@dataclass(frozen=True)
class RequestStatus:
    """Where a request stands: "waiting", "running" or "finished", and how far it is."""

    request_id: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str | None = None


@dataclass(eq=False)
class RequestStream:
    """The engine's side of a stream. Events go in at the end and are read, each once, from the front; the one with a
    finish_reason is the last."""

    request: Request
    generator: random.Random
    text: TextStream
    tokens: list[int]  # the prompt and what was generated
    events: deque[TokenEvent] = field(default_factory=deque)  # not yet read
    withheld: int = 0  # tokens generated, but not read before a cancel
    finish_reason: str | None = None
    drained: bool = False  # the last event was read

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_tokens)

    def token(self, token: int, logprob: float, reason: str | None, step: int, time: float) -> TokenEvent:
        """Append a generated token, with a finish_reason if it is the last."""
        index = self.generated
        self.tokens.append(token)
        text = self.text.push(token) + (self.text.finish() if reason else "")
        event = TokenEvent(self.request.request_id, index, token, text, step, time, logprob, reason)
        self._append(event)
        return event

    def end(self, reason: str, error: str | None, step: int, time: float) -> TokenEvent:
        """Append the end of a request that ends without a token; its index is the next one its reader expects."""
        text = "" if reason == "cancelled" else self.text.finish()
        event = TokenEvent(self.request.request_id, self.generated - self.withheld, None, text, step, time, None,
                           reason, error)
        self._append(event)
        return event

    def _append(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.finish_reason = event.finish_reason

    def withhold(self) -> None:
        """Forget unread tokens: after a cancel nobody sees them."""
        self.withheld += len(self.events)
        self.events.clear()

    def take(self) -> TokenEvent:
        """The next unread event."""
        event = self.events.popleft()
        self.drained = event.finish_reason is not None
        return event
