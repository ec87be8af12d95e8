"""Token events -> a ``response`` object of OpenAI's newer API, or the events of its stream. Stateless: nothing is kept.

    response.created, response.in_progress              the response, still empty
      response.output_item.added                        its one item, a message of the assistant
        response.content_part.added                     its one part, a text
          response.output_text.delta                    one for each token that adds text
          response.output_text.done
        response.content_part.done
      response.output_item.done
    response.completed, or .incomplete                  the response; .failed if it ended with an error

Every event counts ``sequence_number`` on from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starter.errors import EngineError
from starter.schema import TokenEvent
from starter.serving.answers import Answer, Work
from starter.serving.completions import to_json
from starter.serving.fields import ResponseBody
from starter.serving.generation import Numbered
from starter.serving.problems import ApiError, as_api_error

Event = dict[str, Any]


class ResponseWriter:
    """Answers one body, whose conversation has ``prompt_tokens``."""

    def __init__(self, body: ResponseBody, prompt_tokens: int, *, name: str, model: str, created: int) -> None:
        """``name`` is the end of the ids, ``created`` the time in seconds since 1970."""
        self._body, self._prompt_tokens = body, prompt_tokens
        self._name, self._model, self._created = name, model, created
        self._text, self._tokens, self._sequence = "", 0, 0
        self._reason: str | None = None
        self._begun = False

    def add(self, event: TokenEvent) -> list[Event]:
        """Take an event into account; returns what it adds to the stream. ApiError 500 if the sample failed."""
        if event.finish_reason == "error":
            raise ApiError(500, f"the request failed: {event.error}", kind="server_error", code="internal_error")
        events = [] if self._begun else self._beginning()
        self._begun = True
        self._text += event.text
        self._tokens += event.token is not None
        self._reason = event.finish_reason
        if event.text:
            events.append(self._of_text("response.output_text.delta", delta=event.text, logprobs=[]))
        return events

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _of_text(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=f"msg_{self._name}", output_index=0, content_index=0, **fields)

    def _part(self) -> Event:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, status: str) -> Event:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": f"msg_{self._name}", "type": "message", "role": "assistant", "status": status, "content": content}

    def response(self, status: str, error: ApiError | None = None) -> Event:
        """The response object."""
        body, ended = self._body, status in ("completed", "incomplete")
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": self._tokens,
                 "total_tokens": self._prompt_tokens + self._tokens, "input_tokens_details": {"cached_tokens": 0},
                 "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{self._name}", "object": "response", "created_at": self._created, "status": status,
            "model": self._model, "output": [self._item(status)] if ended else [], "usage": usage if ended else None,
            "error": {"code": "server_error", "message": error.message} if error else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature, "top_p": body.top_p, "metadata": {}, "parallel_tool_calls": False,
            "tool_choice": "none", "tools": [], "text": {"format": {"type": "text"}}, "truncation": "disabled",
            "store": False, "previous_response_id": None, "background": False}

    @property
    def status(self) -> str:
        """Of a response that has ended."""
        return "incomplete" if self._reason == "length" else "completed"

    def _beginning(self) -> list[Event]:
        return [self._event("response.created", response=self.response("in_progress")),
                self._event("response.in_progress", response=self.response("in_progress")),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress")),
                self._of_text("response.content_part.added",
                              part={"type": "output_text", "text": "", "annotations": [], "logprobs": []})]

    def ending(self) -> list[Event]:
        """The last events of a stream that went well."""
        return [self._of_text("response.output_text.done", text=self._text, logprobs=[]),
                self._of_text("response.content_part.done", part=self._part()),
                self._event("response.output_item.done", output_index=0, item=self._item(self.status)),
                self._event(f"response.{self.status}", response=self.response(self.status))]

    def failure(self, error: ApiError) -> list[Event]:
        """The last events of one that did not."""
        return [self._event("response.failed", response=self.response("failed", error))]


@dataclass(frozen=True)
class ResponseWork(Work):
    """A response that is being generated."""

    writer: ResponseWriter

    def parts(self, batch: Sequence[Numbered]) -> Iterator[bytes]:
        for _, event in batch:
            yield from map(_sse, self.writer.add(event))

    def last_parts(self) -> list[bytes]:
        return list(map(_sse, self.writer.ending()))

    def parts_of(self, error: EngineError | ApiError) -> list[bytes]:
        return list(map(_sse, self.writer.failure(as_api_error(error))))

    def add(self, batch: Sequence[Numbered]) -> None:
        for _, event in batch:
            self.writer.add(event)

    def answer(self) -> Answer:
        if self.source.cancelled:
            return Answer.of(ApiError(503, "the server shuts down, and the request was cancelled",
                                      kind="server_error", code="shutting_down"))
        return Answer(200, to_json(self.writer.response(self.writer.status)), self.headers)


def _sse(event: Event) -> bytes:
    """A server-sent event with its name, as this API has it; the stream ends without a mark of its own."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + to_json(event) + b"\n\n"
