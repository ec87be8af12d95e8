"""Token events -> what OpenAI's clients read: one ``text_completion`` object, or one chunk for every token.

Choice number p * n + s is sample s of prompt p. Both forms come from the same pieces, so the texts of a stream,
joined, are the text of the whole object. Nothing here waits or knows a socket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starter.base.tokenizer import TextStream, Tokenizer
from starter.sampling import Choice as Scored
from starter.schema import TokenEvent
from starter.serving.fields import CompletionBody
from starter.serving.problems import ApiError

FINISH = {"cancelled": "abort"}  # the engine's word, and vLLM's
DONE = b"data: [DONE]\n\n"


def to_json(document: Mapping[str, object]) -> bytes:
    """JSON as UTF-8, readable as it is; half a surrogate pair, from an error message, becomes a question mark."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def sse(document: Mapping[str, object]) -> bytes:
    """One server-sent event. JSON on one line holds no line end, so it needs one ``data:`` line."""
    return b"data: " + to_json(document) + b"\n\n"


def token_text(tokenizer: Tokenizer, token: int, as_number: bool = False) -> str:
    """How a list of log-probabilities names a token: by its text or, where that is empty or a part of a character (so
    that it would be ambiguous), by its number: "token_id:17"."""
    stream = tokenizer.stream()
    stream.push(token)  # twice: a first token may lose the space that it begins with
    stream.finish()
    text = stream.push(token)
    whole = text and not stream.finish() and "\ufffd" not in text
    return text if whole and not as_number else f"token_id:{token}"


@dataclass
class Choice:
    """One sample as it grows."""

    prompt: int
    before: str  # text that comes before its first token: the prompt, where it is echoed
    decoder: TextStream  # gives each token's place in the text
    offset: int = 0  # characters in the text so far
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    begun: bool = False
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: _no_logprobs())


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class CompletionWriter:
    """Answers one body, of which ``prompts`` are the tokens."""

    def __init__(self, body: CompletionBody, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, *, name: str,
                 model: str, created: int) -> None:
        """``name`` is the id of the answer, ``created`` its time in seconds since 1970."""
        self.name, self._body, self._prompts, self._tokenizer = name, body, prompts, tokenizer
        self.scores: Callable[[int], Sequence[Scored | None]] = lambda prompt: ()  # its tokens, once it is computed
        self._about = {"id": name, "object": "text_completion", "created": created, "model": model}
        self._choices: list[Choice] = []
        for number, tokens in enumerate(prompts):
            for _ in range(body.n):
                decoder = tokenizer.stream()
                text = "".join(map(decoder.push, tokens))
                given = body.prompt[number]
                before = (given if isinstance(given, str) else text) if body.echo else ""
                self._choices.append(Choice(number, before, decoder, len(before)))

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of all prompts, and generated so far by all samples."""
        prompt, completion = sum(map(len, self._prompts)), sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def add(self, prompt: int, event: TokenEvent) -> dict[str, object]:
        """Take an event of a prompt into account; returns it as a chunk. ApiError 500 if the sample failed."""
        if event.finish_reason == "error":
            raise ApiError(500, f"the request failed: {event.error}", kind="server_error", code="internal_error")
        index = prompt * self._body.n + event.sample
        choice = self._choices[index]
        if self._body.only_scores:  # the one token was generated for the prompt's sake
            event = event._replace(token=None, text="", finish_reason=event.finish_reason and "length")
        text, choice.before = choice.before + event.text, ""
        choice.texts.append(text)
        reason = event.finish_reason and FINISH.get(event.finish_reason, event.finish_reason)
        choice.finish_reason = reason
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._of_prompt(prompt) if self._body.echo and not choice.begun else _no_logprobs()
            if event.token is not None:
                self._add_logprobs(logprobs, choice, event.token, event)
            for key, values in logprobs.items():
                choice.logprobs[key] += values
        choice.begun = True
        choice.tokens += event.token is not None
        chunk = {**self._about, "choices": [{"index": index, "text": text, "logprobs": logprobs,
                                             "finish_reason": reason}]}
        at_end, always = self._body.usage
        if at_end:
            chunk["usage"] = self.usage if always else None
        return chunk

    def _add_logprobs(self, lists: dict[str, list[Any]], choice: Choice, token: int, event: TokenEvent) -> None:
        self._add(lists, token, event.logprob, event.top_logprobs, choice.offset)
        choice.offset += len(choice.decoder.push(token))

    def _of_prompt(self, prompt: int) -> dict[str, list[Any]]:
        """The lists of an echoed prompt; its first token has no log-probability."""
        lists, offset, decoder = _no_logprobs(), 0, self._tokenizer.stream()
        for token, score in zip(self._prompts[prompt], self.scores(prompt)):
            logprob, likeliest = (score.logprob, score.top_logprobs) if score else (None, ())
            self._add(lists, token, logprob, likeliest, offset)
            offset += len(decoder.push(token))
        return lists

    def _add(self, lists: dict[str, list[Any]], token: int, logprob: float | None,
             top_logprobs: Sequence[tuple[int, float]], offset: int) -> None:
        as_number = self._body.return_tokens_as_token_ids
        name = token_text(self._tokenizer, token, as_number)
        likeliest = {token_text(self._tokenizer, other, as_number): number for other, number in top_logprobs}
        if logprob is not None:
            likeliest.setdefault(name, logprob)  # the token itself is always there
        for key, value in (("tokens", name), ("token_logprobs", logprob), ("text_offset", offset),
                           ("top_logprobs", None if logprob is None else likeliest)):
            lists[key].append(value)

    def last_chunk(self) -> dict[str, object] | None:
        """The chunk that tells the usage and holds no choice, if it was asked for."""
        return {**self._about, "choices": [], "usage": self.usage} if self._body.usage[0] else None

    def whole(self) -> dict[str, object]:
        """The completion object, once all events were added."""
        choices = [{"index": index, "text": "".join(choice.texts),
                    "logprobs": None if self._body.logprobs is None else choice.logprobs,
                    "finish_reason": choice.finish_reason} for index, choice in enumerate(self._choices)]
        return {**self._about, "choices": choices, "usage": self.usage}
