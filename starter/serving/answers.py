"""What is asked and what is answered, whichever server carries it.

    Answer     complete
    Work       grows from a source: server-sent events as they come or, where it is not streamed, one answer at the end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from starter.errors import EngineError
from starter.serving.chat import ChatWriter
from starter.serving.completions import DONE, CompletionWriter, sse, to_json
from starter.serving.generation import Numbered, Source
from starter.serving.problems import ApiError, as_api_error


@dataclass(frozen=True)
class HttpRequest:
    """Header names are in lower case; ``path`` is without a query, as it was sent."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """An answer that is complete."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"

    @classmethod
    def of(cls, error: ApiError) -> Answer:
        return cls(error.status, to_json(error.to_dict()), error.headers)


@dataclass(frozen=True)
class Work(ABC):
    """Enter its ``source`` as a context manager, so that it ends whatever happens."""

    source: Source[Any]
    streams: bool
    headers: Mapping[str, str]

    @abstractmethod
    def parts(self, batch: Sequence[Any]) -> Iterator[bytes]:
        """Server-sent events, one for each item of the source. ApiError where it has failed."""

    def last_parts(self) -> list[bytes]:
        """The last server-sent events of a stream that went well."""
        return [DONE]

    def parts_of(self, error: EngineError | ApiError) -> list[bytes]:
        """The last events of one that did not."""
        return [sse(as_api_error(error).to_dict()), DONE]

    def stream(self) -> Generator[bytes, None, None]:
        """All server-sent events, as they come."""
        try:
            with closing(self.source.batches()) as batches:
                for batch in batches:
                    yield from self.parts(batch)
            last = self.last_parts()
        except (EngineError, ApiError) as error:
            last = self.parts_of(error)
        yield from last

    def add(self, batch: Sequence[Any]) -> None:
        """Items of an answer that is not streamed. ApiError where the source has failed."""
        for _ in self.parts(batch):
            pass

    def answer(self) -> Answer:
        """The one answer, once all items were added."""
        return Answer(204)

    def whole(self) -> Answer:
        """Wait for the end."""
        try:
            for batch in self.source.batches():
                self.add(batch)
        except (EngineError, ApiError) as error:
            return Answer.of(as_api_error(error))
        return self.answer()


@dataclass(frozen=True)
class CompletionWork(Work):
    """A completion that is being generated."""

    writer: CompletionWriter | ChatWriter

    def parts(self, batch: Sequence[Numbered]) -> Iterator[bytes]:
        for number, event in batch:
            yield sse(self.writer.add(number, event))

    def last_parts(self) -> list[bytes]:
        last = self.writer.last_chunk()
        return [*([sse(last)] if last else []), DONE]

    def add(self, batch: Sequence[Numbered]) -> None:
        for number, event in batch:
            self.writer.add(number, event)

    def answer(self) -> Answer:
        if self.source.cancelled:
            return Answer.of(ApiError(503, "the server shuts down, and the request was cancelled",
                                      kind="server_error", code="shutting_down"))
        return Answer(200, to_json(self.writer.whole()), self.headers)
