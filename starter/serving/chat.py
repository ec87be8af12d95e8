"""Token events -> a ``chat.completion`` object, or its chunks: one for each token.

The first chunk of each choice names the role, the last one says why it ended. Log-probabilities list each token's text
and bytes: the bytes of several tokens may be one character.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starter.base.tokenizer import Tokenizer
from starter.schema import TokenEvent
from starter.serving.completions import FINISH
from starter.serving.fields import ChatBody
from starter.serving.problems import ApiError


@dataclass
class Answering:
    """One sample as it grows."""

    text: str = ""
    tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    begun: bool = False


class ChatWriter:
    """Answers one body, whose conversation has ``prompt_tokens``."""

    def __init__(self, body: ChatBody, prompt_tokens: int, tokenizer: Tokenizer, *, name: str, model: str,
                 created: int) -> None:
        """``name`` is the id of the answer, ``created`` its time in seconds since 1970."""
        self.name, self._body, self._prompt_tokens, self._tokenizer = name, body, prompt_tokens, tokenizer
        self._about = {"id": name, "created": created, "model": model}
        self._choices = [Answering() for _ in range(body.n)]

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the conversation, and generated so far by all samples."""
        completion = sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion,
                "total_tokens": self._prompt_tokens + completion}

    def add(self, prompt: int, event: TokenEvent) -> dict[str, object]:
        """Take an event into account; returns it as a chunk. ApiError 500 if the sample failed."""
        if event.finish_reason == "error":
            raise ApiError(500, f"the request failed: {event.error}", kind="server_error", code="internal_error")
        choice = self._choices[event.sample]
        delta = {"content": event.text} if choice.begun else {"role": "assistant", "content": event.text}
        choice.begun = True
        choice.text += event.text
        choice.finish_reason = event.finish_reason and FINISH.get(event.finish_reason, event.finish_reason)
        logprobs = None
        if event.token is not None:
            choice.tokens += 1
            if self._body.logprobs:
                choice.logprobs.append(self._scored(event, event.token))
                logprobs = {"content": choice.logprobs[-1:], "refusal": None}
        chunk = {**self._about, "object": "chat.completion.chunk", "choices": [
            {"index": event.sample, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish_reason}]}
        at_end, always = self._body.usage
        if at_end:
            chunk["usage"] = self.usage if always else None
        return chunk

    def _scored(self, event: TokenEvent, token: int) -> dict[str, Any]:
        listed = event.top_logprobs[:self._body.top_logprobs or 0]
        return {**self._named(token, event.logprob or 0.0), "top_logprobs": [self._named(*pair) for pair in listed]}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def last_chunk(self) -> dict[str, object] | None:
        """The chunk that tells the usage and holds no choice, if it was asked for."""
        last = {**self._about, "object": "chat.completion.chunk", "choices": [], "usage": self.usage}
        return last if self._body.usage[0] else None

    def whole(self) -> dict[str, object]:
        """The completion object, once all events were added."""
        choices = [{"index": index, "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
                    "finish_reason": choice.finish_reason} for index, choice in enumerate(self._choices)]
        return {**self._about, "object": "chat.completion", "choices": choices, "usage": self.usage}
