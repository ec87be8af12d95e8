"""M6 · Prometheus' text exposition format (version 0.0.4): what a server answers when it is scraped.

    # HELP vllm:num_requests_running Requests that run.
    # TYPE vllm:num_requests_running gauge
    vllm:num_requests_running{model_name="tiny"} 3
    # HELP vllm:time_to_first_token_seconds From arrival to the first token.
    # TYPE vllm:time_to_first_token_seconds histogram
    vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="0.001"} 0     samples of at most 0.001: cumulative
    ...
    vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="+Inf"} 7
    vllm:time_to_first_token_seconds_sum{model_name="tiny"} 4.25
    vllm:time_to_first_token_seconds_count{model_name="tiny"} 7
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Union


@dataclass(frozen=True)
class Histogram:
    """Samples by size: ``counts[i]`` of them are at most ``bounds[i]``, the last of which is infinite (None)."""

    bounds: tuple[float | None, ...]
    counts: tuple[int, ...]
    sum: float

    @classmethod
    def of(cls, bounds: Sequence[float], numbers: Sequence[int], total: float) -> Histogram:
        """``numbers`` of samples between the bounds, below the first and above the last; and their sum."""
        return cls((*bounds, None), tuple(accumulate(numbers)), total)

    @property
    def count(self) -> int:
        """Samples."""
        return self.counts[-1]


@dataclass(frozen=True)
class Family:
    """A metric: a "gauge" or "counter" with one number, or with one for each value of ``label``; or a "histogram"."""

    name: str
    kind: str
    meaning: str
    value: Union[float, Mapping[str, float], Histogram]
    label: str = ""


def exposition(prefix: str, labels: Mapping[str, str], families: Iterable[Family]) -> str:
    """The text; every name gets ``prefix``, every sample ``labels``."""
    return "".join(f"{line}\n" for family in families for line in _lines(prefix + family.name, labels, family))


def _lines(name: str, labels: Mapping[str, str], family: Family) -> Iterator[str]:
    meaning = family.meaning.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {family.kind}"
    value = family.value
    if isinstance(value, Histogram):
        for bound, count in zip(value.bounds, value.counts):
            yield _line(f"{name}_bucket", {**labels, "le": _number(inf if bound is None else bound)}, count)
        yield _line(f"{name}_sum", labels, value.sum)
        yield _line(f"{name}_count", labels, value.count)
    elif isinstance(value, Mapping):
        for key, number in value.items():
            yield _line(name, {**labels, family.label: key}, number)
    else:
        yield _line(name, labels, value)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {_number(value)}"


def _escaped(text: str) -> str:
    """A label's value; half a surrogate pair, which no UTF-8 text can hold, as a question mark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == inf else str(value)
