"""M3 · The requests that an engine knows: those that are live, and those whose events were not all read.

    streams    by request id: every one of them
    samples    by sequence id: the live ones only, as the scheduler knows them (n samples of a request are n sequences)

An id is taken while its request is live or has unread events; after that it may be used again. The table holds no lock:
the engine holds its own around every call.
"""

from __future__ import annotations

from .errors import DuplicateRequestError, UnknownRequestError
from .model_config import ModelConfig
from .requests import Request, TokenEvent, sample_id
from .sampling import Draws
from .stop_strings import StopStrings
from .streams import RequestStream, Sample
from .tokenizer import Tokenizer


class RequestTable:
    """Streams and samples, found by their ids."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, seed: int) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self.streams: dict[str, RequestStream] = {}
        self.samples: dict[str, Sample] = {}
        self._added = 0

    def fresh_id(self) -> str:
        """An id that no known request has."""
        number = self._added
        while f"request-{number}" in self.streams:
            number += 1
        return f"request-{number}"

    def check(self, request: Request) -> None:
        """RequestError for what the model cannot serve, DuplicateRequestError for an id that is taken."""
        request.check_against(self._config)
        taken = self.streams.get(request.request_id)
        if taken and taken.finish_reason not in (None, "cancelled"):
            raise DuplicateRequestError(f"the stream of the finished request {request.request_id!r} was not read to "
                                        f"its end; read it, or choose another id")
        for number in range(request.sampling.n):
            if (sequence_id := sample_id(request.request_id, number)) in self.samples:
                raise DuplicateRequestError(f"request {sequence_id!r} is live; choose another id or cancel it first")

    def make_stream(self, request: Request) -> RequestStream:
        """A stream with its samples, not yet in the table."""
        eos_tokens = () if request.sampling.ignore_eos else self._config.eos_tokens
        stream = RequestStream(request, end_tokens=(*eos_tokens, *request.stop_tokens))
        for number in range(request.sampling.n):
            decoder = self._tokenizer.stream()
            for token in request.prompt_tokens:  # the text goes on from the prompt's, which its reader knows
                decoder.push(token)
            draws = Draws(request.sampling, request.request_id, number, self._seed)
            stops = StopStrings(request.sampling.stop) if request.sampling.stop else None
            stream.samples.append(Sample(stream, number, draws, decoder, stops, list(request.prompt_tokens),
                                         started=number == 0))
        stream.samples[0].others = stream.samples[1:]
        return stream

    def add(self, stream: RequestStream) -> None:
        """The request was accepted."""
        self._added += 1
        self.streams[stream.request.request_id] = stream
        self.samples.update({sample.id: sample for sample in stream.samples})

    def find(self, request_id: str) -> RequestStream:
        """A known request's stream, or UnknownRequestError."""
        stream = self.streams.get(request_id) if isinstance(request_id, str) else None
        if stream is None:
            raise UnknownRequestError(f"no request {request_id!r}: it was never submitted, or its stream was read to "
                                      f"the end")
        return stream

    def take(self, stream: RequestStream) -> TokenEvent:
        """The next unread event; with the last one the request is forgotten."""
        event = TokenEvent._make(stream.events.popleft())
        if stream.drained and self.streams.get(event.request_id) is stream:  # a newer request may have the id
            del self.streams[event.request_id]
        return event
