"""M6 · Prometheus' text exposition format (version 0.0.4): what a server answers to a scrape.

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Union

from starter.base.statistics import Histogram
from starter.metrics import Metrics


@dataclass(frozen=True)
class Family:
    """A metric: a "gauge" or "counter" with one number, or one for each value of ``label``; or a "histogram"."""

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
    """A label's value; half of a surrogate pair, which UTF-8 cannot encode, becomes a question mark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == inf else str(value)


def to_prometheus(metrics: Metrics, prefix: str = "vllm:") -> str:
    """The text that a Prometheus server scrapes, with vLLM's names and meanings: a dashboard made for vLLM shows
    this engine. vLLM calls a cancelled request aborted."""
    shown = metrics.histograms
    success = {reason.replace("cancelled", "abort"): number for reason, number in metrics.finished.items()}
    return exposition(prefix, {"model_name": metrics.model_name}, (
        Family("num_requests_running", "gauge", "Requests that run.", metrics.running),
        Family("num_requests_waiting", "gauge", "Requests that wait.", metrics.waiting),
        Family("kv_cache_usage_perc", "gauge", "KV pages in use; 1 means all of them.", metrics.kv_usage),
        Family("num_preemptions_total", "counter", "Preemptions.", metrics.preemptions),
        Family("prompt_tokens_total", "counter", "Tokens of prompts that were processed.", metrics.prefilled_tokens),
        Family("generation_tokens_total", "counter", "Tokens that were generated.", metrics.output_tokens),
        Family("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.",
               metrics.queried_tokens),
        Family("prefix_cache_hits_total", "counter", "Prompt tokens found there.", metrics.found_tokens),
        Family("request_success_total", "counter", "Requests that ended.", success, "finished_reason"),
        Family("time_to_first_token_seconds", "histogram", "From arrival to the first token.", shown["ttft"]),
        Family("inter_token_latency_seconds", "histogram", "Between two tokens of a request.", shown["itl"]),
        Family("time_per_output_token_seconds", "histogram", "The same, under its name before vLLM 0.11.",
               shown["itl"]),
        Family("request_time_per_output_token_seconds", "histogram", "The mean of it over a request.",
               shown["tpot"]),
        Family("e2e_request_latency_seconds", "histogram", "From arrival to the end.", shown["e2e"]),
        Family("request_queue_time_seconds", "histogram", "From arrival to the first admission.", shown["queue"])))
