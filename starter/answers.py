"""M3 · What a step's computation means for its requests: tokens for their streams, ends, and failures.

    row of logits --choose--> a token (after a prompt, one for each sample) --settle--> stream, scheduler, timeline
    an exception  ----------------------------------------------------------settle--> a last event with the reason

Choosing changes nothing but a sample's random numbers, and those count only when their token is accepted; so a step
that is interrupted before ``settle`` can be planned and chosen again. The engine holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .executor import Row
from .logits import Choice, Logits
from .recorder import Recorder
from .request_table import RequestTable
from .sampling import greedy, sample
from .scheduler import ContinuousBatchScheduler
from .streams import RequestStream, Sample


class Answers:
    """Passes on what was computed, and ends what has ended."""

    def __init__(self, requests: RequestTable, scheduler: ContinuousBatchScheduler, recorder: Recorder) -> None:
        self._requests, self._scheduler, self._recorder = requests, scheduler, recorder

    def settle(self, choices: Mapping[Sample, Choice], failures: Mapping[Sample, Exception]) -> None:
        """The step's tokens are chosen: end what has failed, start further samples, tell everybody."""
        self._recorder.step_completed()
        for sample_, failure in failures.items():
            self.end_all(sample_.stream, "error", f"{type(failure).__name__}: {failure}")
        self._scheduler.complete_step()
        self.end_failures()
        self._add_tokens(choices)

    def choose(self, rows: Mapping[Sample, Row]) -> tuple[dict[Sample, Choice], dict[Sample, Exception]]:
        """Sample the next tokens; a row after a prompt is for all samples of its request, the first before the others.
        Whatever is wrong with a row concerns its request alone."""
        choices: dict[Sample, Choice] = {}
        failures: dict[Sample, Exception] = {}
        for sample_, row in rows.items():
            if isinstance(row, Logits) and sample_.plain and not sample_.others:  # nearly all, on a backend of arrays
                choices[sample_] = row.greedy
                continue
            if isinstance(row, Exception):
                failures[sample_] = row
                continue
            try:
                choices[sample_] = self._choice(sample_, row)
                for other in sample_.others:
                    choices[other] = self._choice(other, row)
            except Exception as error:
                failures[sample_] = error
        return choices, failures

    def _choice(self, sample_: Sample, row: Sequence[float]) -> Choice:
        if sample_.plain:  # as nearly always
            return greedy(row)
        stream = sample_.stream
        return sample(row, stream.request.sampling, sample_.draws, stream.request.prompt_tokens,
                      sample_.tokens[sample_.prompt_length:], stream.end_tokens)

    def _start_others(self, first: Sample) -> None:
        """After the prompt, the other samples start from the same pages."""
        others, first.others = first.others, ()
        for sample_ in others:
            sample_.started = True
            self._recorder.event("fork", request=sample_.id, parent=first.id)
            if self._scheduler.is_running(first.id):  # else it has all its tokens with this one
                self._scheduler.fork(first.id, replace(first.stream.request, request_id=sample_.id))

    def _add_tokens(self, choices: Mapping[Sample, Choice]) -> None:
        """A new token goes into its stream; a sample ends here if it is its last."""
        recorder, listeners = self._recorder, self._recorder.timeline.listeners
        for sample_, choice in choices.items():
            if sample_.finish_reason:  # it has failed, or who listens cancelled it just now
                continue
            if sample_.others:
                self._start_others(sample_)
            event = sample_.add(choice, recorder.steps - 1, recorder.now)
            reason = sample_.finish_reason
            recorder.tokens[sample_.id] = event if sample_.plain else (*event[:-1], ())  # without top_logprobs
            if listeners:  # they hear of it before there is another, which they might cancel
                recorder.write_tokens()
            if reason:
                self._finish(sample_, reason)
        recorder.write_tokens()

    def _finish(self, sample_: Sample, reason: str) -> None:
        """The sample has its last token."""
        if self._scheduler.is_running(sample_.id):  # at max_tokens it has ended by itself
            self._scheduler.finish(sample_.id, reason)
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
