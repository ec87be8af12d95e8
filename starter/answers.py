"""M3 · What a step's computation means for its requests: tokens for their streams, ends, and failures.

    row of logits --choose--> a token (after a prompt, one for each sample) --settle--> stream, scheduler, timeline
    an exception  ----------------------------------------------------------settle--> a last event with the reason

Choosing changes nothing but a sample's random numbers, and those count only when their token is accepted; so a step
that is interrupted before ``settle`` can be planned and chosen again. The engine holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Union

from .executor import Row
from .recorder import Recorder
from .request_table import RequestTable
from .sampling import Choice, sample
from .scheduler import ContinuousBatchScheduler
from .streams import RequestStream, Sample

Outcome = Union[list[Choice], Exception]  # of a sequence in a step: its token (after a prompt, one for each sample)


class Answers:
    """Passes on what was computed, and ends what has ended."""

    def __init__(self, requests: RequestTable, scheduler: ContinuousBatchScheduler, recorder: Recorder) -> None:
        self._requests, self._scheduler, self._recorder = requests, scheduler, recorder

    def settle(self, outcomes: Mapping[Sample, Outcome]) -> None:
        """The step's tokens are chosen: end what has failed, start further samples, tell everybody."""
        self._recorder.step_completed()
        for sample_, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self.end_all(sample_.stream, "error", f"{type(outcome).__name__}: {outcome}")
        self._scheduler.complete_step()
        self.end_failures()
        for sample_, outcome in outcomes.items():
            if not isinstance(outcome, Exception) and sample_.finish_reason is None:
                started = (sample_,) if len(outcome) == 1 else self._start_others(sample_)
                for each, choice in zip(started, outcome):
                    if each.finish_reason is None:  # who listens may cancel while the first ones are told
                        self._emit(each, choice)

    def choose(self, sample_: Sample, row: Row) -> Outcome:
        """Sample the next token; after the prompt of a request with n samples, one for each."""
        if isinstance(row, Exception):
            return row
        stream, request = sample_.stream, sample_.stream.request
        try:
            if request.sampling.plain:  # as nearly always: nothing but the row matters, so all samples are alike
                return [sample(row, request.sampling, sample_.draws)] * len(stream.due(sample_))
            return [sample(row, request.sampling, each.draws, request.prompt_tokens,
                           each.tokens[len(request.prompt_tokens):], stream.end_tokens)
                    for each in stream.due(sample_)]
        except Exception as error:  # whatever is wrong with this row concerns this request alone
            return error

    def _start_others(self, first: Sample) -> list[Sample]:
        """After the prompt, the other samples start from the same pages; the first is the first of all of them."""
        started = first.stream.due(first)
        for sample_ in started[1:]:
            sample_.started = True
            self._recorder.event("fork", request=sample_.id, parent=first.id)
            if self._scheduler.is_running(first.id):  # else it has all its tokens with this one
                self._scheduler.fork(first.id, replace(first.stream.request, request_id=sample_.id))
        return started

    def _emit(self, sample_: Sample, choice: Choice) -> None:
        """A new token goes into its stream; the sample ends here if it is its last."""
        ends = choice.token in sample_.stream.end_tokens
        event = sample_.add(choice, ends, self._recorder.steps - 1, self._recorder.clock())
        self._recorder.token(sample_.id, event)
        if event.finish_reason:
            if self._scheduler.is_running(sample_.id):  # at max_tokens it has ended by itself
                self._scheduler.finish(sample_.id, event.finish_reason)
            self._forget(sample_)

    def end_all(self, stream: RequestStream, reason: str, error: str | None = None) -> None:
        """End all unfinished samples of a request without a token."""
        for sample_ in stream.samples:
            if self._scheduler.is_live(sample_.id):
                self._scheduler.finish(sample_.id, reason)
            if sample_.finish_reason is None:
                self._end(sample_, reason, error)

    def _end(self, sample_: Sample, reason: str, error: str | None) -> None:
        sample_.end(reason, error, self._recorder.steps, self._recorder.clock())
        self._forget(sample_, **({"error": error} if error else {}))

    def _forget(self, sample_: Sample, **fields: object) -> None:
        """A finished sample is no longer a sequence; only its events remain, until they are read."""
        del self._requests.samples[sample_.id]
        if sample_.started:
            self._recorder.event("finish", request=sample_.id, reason=sample_.finish_reason, tokens=sample_.generated,
                                 **fields)

    def end_failures(self) -> None:
        """Sequences whose pages could not be provided end, and with a first one those it has not started yet."""
        for sequence_id, reason in self._scheduler.take_failures().items():
            failed = self._requests.samples[sequence_id]
            for sample_ in failed.stream.samples:
                if sample_ is failed or not sample_.started:
                    self._end(sample_, "error", reason)
