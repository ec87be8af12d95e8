"""Mistakes found on the way: scenarios, requests and their ids, the reference, text."""

from __future__ import annotations

from dataclasses import replace
from math import cos, sin

from starter import reference
from starter.backends.lanes.backend import LanesBackend
from starter.base.strict_json import Integer
from starter.core import EngineCore
from starter.engine import InferenceEngine
from starter.errors import SchemaError, UnknownRequestError
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import load_scenario
from starter.streams import Sample

from .mistake import mistake


@mistake(None, "M1Reference.test_fixture_is_a_complete_scenario", says="keep the golden output")
def golden_output_forgotten(patch):
    """The golden output of a scenario is not read."""
    patch.everywhere(load_scenario, lambda path: replace(load_scenario(path), golden=None))


@mistake(None, "M1Reference.test_malformed_scenarios_are_refused", says="JSON pointer")
def schema_errors_without_a_place(patch):
    """A SchemaError does not say which value is wrong."""
    def load(path):
        try:
            return load_scenario(path)
        except SchemaError as error:
            raise SchemaError(str(error), "/") from None

    patch.everywhere(load_scenario, load)


@mistake(None, "M1Reference.test_golden_sequences", says="differs from its golden output")
def fast_backend_forgets_the_rotation(patch):
    """The fast backend leaves the rotary embedding out, the reference has it."""
    patch(LanesBackend, "rotate", lambda self, x, *angles: x)


@mistake(None, "M1Reference.test_reference_equals_independent_decoder", says="rotary pairs")
def rotary_pairs_as_halves(patch):
    """The reference turns the pairs (i, i + d/2) of a head instead of (2i, 2i + 1)."""
    def rotary(config, x, position):
        width, half = config.head_width, config.head_width // 2
        turned = list(x)
        for first in (i for i in range(len(x)) if i % width < half):
            angle = position * config.rope_theta ** (-2 * (first % width) / width)
            a, b = x[first], x[first + half]
            turned[first], turned[first + half] = a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle)
        return turned

    patch(reference, "rotary", rotary)


@mistake(None, "M1Reference.test_text_of_a_stream", says="what its token adds")
def text_of_the_last_token_lost(patch):
    """The last event of a stream has no text."""
    right = Sample.add

    def add(self, choice, *arguments):
        event = right(self, choice, *arguments)
        if event.finish_reason:
            event = self.stream.events[-1] = event._replace(text="")
        return event

    patch(Sample, "add", add)


@mistake(None, "M1Reference.test_no_tokens_wanted", says="gives no token")
def no_tokens_means_one(patch):
    """max_tokens=0 gives a token all the same."""
    right = InferenceEngine.submit

    def submit(self, prompt_tokens, max_tokens, **keywords):
        return right(self, prompt_tokens, max_tokens or 1, **keywords)

    patch(InferenceEngine, "submit", submit)


@mistake(None, "M1Reference.test_bad_requests_change_nothing", says="boolean")
def true_taken_for_1(patch):
    """True is an int in Python, and passes for a token."""
    right = Integer.problem
    patch(Integer, "problem", lambda self, value: right(self, 1 if value is True else value))


@mistake(None, "M1Reference.test_duplicate_ids", says="DuplicateRequestError")
def second_request_replaces_the_first(patch):
    """An id that is taken is given to the new request."""
    patch(EngineCore, "check", lambda self, request: request.check_against(self.model.config))
    patch(ContinuousBatchScheduler, "_require_free", lambda self, request_id: None)


@mistake(None, "M1Reference.test_unknown_ids", says="UnknownRequestError")
def cancel_of_an_unknown_id_ignored(patch):
    """Cancelling an id that was never submitted does nothing."""
    right = InferenceEngine.cancel

    def cancel(self, request_id):
        try:
            right(self, request_id)
        except UnknownRequestError:
            return

    patch(InferenceEngine, "cancel", cancel)
