"""What can be quoted from a file: every figure of a timeline, a benchmark or a quantization report, by name, as it is
written in a report: {"TTFT, median": "6.0 steps", "batch utilization": "81%", ...}.

``scripts/report.py`` puts them into tables, and takes them from here again to check what a report says.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.benches.rounds import like_ours, quartiles, ratio
from scripts.benches.tables import number
from starter.base.statistics import Summary
from starter.base.strict_json import read_json
from starter.base.wings import wing
from starter.errors import SchemaError
from starter.metrics import Metrics
from starter.timeline import Event

Figures = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Source:
    """A file and all that can be quoted from it, as it is written: {"TTFT, median": "6.0 steps", ...}."""

    path: Path
    kind: str  # "timeline", "bench", "tables" (what other suites than stdlib write) or "quantization"
    figures: Mapping[str, str]
    data: Any  # what the pictures are drawn from: the events, or the document


def read_source(path: Path) -> Source:
    """Read a file and work out its figures. SchemaError for a file that none of the commands above has written."""
    if path.suffix not in (".json", ".jsonl"):
        raise SchemaError(f"{path} is neither a timeline, whose name ends with .jsonl, nor a .json file of figures")
    if path.suffix == ".jsonl":
        events = wing("observe.timeline_file", f"{path}, a timeline,").read_timeline(path)
        source = Source(path, "timeline", dict(_of_timeline(events)), events)
    else:
        document: Any = read_json(path)
        try:
            kind, figures_of = (("quantization", _of_quantization) if "rows" in document else
                                ("tables", _of_tables) if "tables" in document else ("bench", _of_bench))
            figures = dict(figures_of(document))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"{path} is not what scripts/bench.py --json or scripts/quant_report.py --json writes "
                              f"({type(error).__name__}: {error})") from None
        source = Source(path, kind, figures, document)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Source(path, source.kind, {"sha256": digest, **source.figures}, source.data)


def _of_timeline(events: Sequence[Event]) -> Figures:
    header, metrics = events[0], Metrics.of(events)
    model = wing("observe.report", "a timeline").build_model(events)
    seconds = header["step_seconds"]  # of a step on the virtual clock
    scale, unit = (1000.0, "ms") if seconds is None else (1 / seconds, "steps")

    def times(name: str, summary: Summary) -> Figures:
        for which, value in (("median", summary.p50), ("p90", summary.p90), ("largest", summary.max)):
            yield f"{name}, {which}", "-" if value is None else f"{value * scale:.1f} {unit}"

    yield from times("TTFT", metrics.ttft)
    yield from times("TPOT", metrics.tpot)
    yield from times("end to end", metrics.e2e)
    yield from times("queue", metrics.queue)
    rate = metrics.tokens_per_second
    yield from {
        "requests": f"{metrics.submitted}", "refused": f"{metrics.refused}", "steps": f"{metrics.steps}",
        "output tokens": f"{metrics.output_tokens}",
        "output tokens/s": "-" if rate is None or unit == "steps" else f"{rate:.1f}",
        "positions computed": f"{metrics.computed_tokens}", "prompt tokens found": f"{metrics.found_tokens}",
        "batch utilization": _percent(metrics.batch_utilization),
        "most requests in a step": f"{metrics.active_peak}",
        "preemptions": f"{metrics.preemptions}", "KV pages, peak": f"{metrics.kv_peak_pages}",
        "KV bytes, peak": f"{metrics.kv_peak_bytes:,}", "weight bytes": f"{metrics.weight_bytes:,}",
        "empty slots, mean": "-" if metrics.fragmentation_mean is None else f"{metrics.fragmentation_mean:.1f}",
        "outputs": _outputs(events), "events": f"{len(events)}", "engine": header["engine"],
        "backend": header["backend"], "clock": "real" if seconds is None else f"virtual, {seconds:g} s a step",
        "model": metrics.model_name, "weights sha256": (header.get("weights_sha256") or "-")[:16],
        "weight quantization": _config(header.get("quantization")),
        **{name.replace("_", " "): _plain(value) for name, value in header["settings"].items()},
    }.items()
    for life in model["requests"]:
        if "parent" not in life and not life.get("outside"):
            yield f"{life['id']}: TTFT", f"{life['ttft'] * scale:.1f} {unit}" if "ttft" in life else "-"


def _outputs(events: Iterable[Event]) -> str:
    """How many requests ended by themselves, and a digest of their tokens: equal digests, equal outputs."""
    tokens: dict[str, list[int]] = {}
    ended: dict[str, list[int]] = {}
    for event in events:
        if event["event"] in ("submit", "fork"):
            tokens[event["request"]] = []
        elif event["event"] == "token":
            tokens[event["request"]].append(event["token"])
        elif event["event"] == "finish" and event["reason"] in ("stop", "length"):
            ended[event["request"]] = tokens[event["request"]]
    return f"{len(ended)}, {hashlib.sha256(json.dumps(sorted(ended.items())).encode()).hexdigest()[:8]}"


def _of_machine(about: Any) -> Figures:
    yield "Python", about["python"]
    yield "system", about["system"]
    yield "cores", f"{about['cores']}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in about["packages"].items() if version) or "none"


def _of_tables(document: Any) -> Figures:
    yield from _of_machine(document["machine"])
    for table in document["tables"]:
        for row in table["rows"]:
            name = f"{table['title']}, {row['name']}"
            if row["values"]:
                low, median, high = quartiles(row["values"])
                yield f"{name}: {table['unit']}", number(median)
                yield f"{name}: middle half", f"{number(low)} to {number(high)}"
                yield f"{name}: x {table['against']}", "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
                for heading, value in row["cells"].items():
                    yield f"{name}: {heading}", "-" if value is None else format(value, table["columns"][heading])


def _of_bench(document: Any) -> Figures:
    yield from _of_machine(document["machine"])
    for row in document["products_ns"]:
        for name, value in row.items():
            if name not in ("rows", "columns"):
                yield f"{row['rows']} x {row['columns']}: {name}", f"{value:.2f}"
    for shape, found in document["shapes"].items():
        yield f"{shape}: loaded in", f"{found['load_seconds']:.1f} s"
        yield f"{shape}: bytes a weight", f"{found['bytes_per_weight']:.1f}"
        results = found["tokens_per_second"]
        for name, values in results.items():
            low, median, high = quartiles(values)
            own = found["overhead"].get(name)
            yield f"{shape}, {name}: tokens/s", f"{median:,.1f}"
            yield f"{shape}, {name}: middle half", f"{low:,.1f} to {high:,.1f}"
            yield f"{shape}, {name}: x llama2-py", ratio(values, results.get("llama2-py"))
            yield f"{shape}, {name}: x transformers", ratio(values, results.get(like_ours(name)))
            yield f"{shape}, {name}: engine's own time", "-" if own is None else f"{own:.1%}"


def _of_quantization(document: Any) -> Figures:
    yield "poems", f"{document['poems']}"
    yield "samples", f"{document['samples']}"
    for row in document["rows"]:
        name = row["name"]
        yield f"{name}: weight bytes", f"{row['weight_bytes']:,}"
        yield f"{name}: of float32", f"{row['weight_share']:.3f}"
        yield f"{name}: KV bytes a token", f"{row['kv_token_bytes']:,.0f}"
        yield f"{name}: rms error", f"{row['weight_rms']:.4f}"
        yield f"{name}: largest error", f"{row['weight_max']:.3f}"
        yield f"{name}: change of logits", f"{row['logit_rms']:.4f}"
        yield f"{name}: loss", f"{row['loss']:.4f}"
        yield f"{name}: change of loss", f"{row['loss_change']:+.4f}"
        yield f"{name}: keeps the form", _percent(row["form"])
        yield f"{name}: differs at", _plain(row["differs_at"])
        yield f"{name}: tokens/s", f"{row['tokens_per_second']:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _plain(value: object) -> str:
    return "-" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _config(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return "-"
    return f"int{config['bits']}, " + (f"groups of {config['group_size']}" if config["group_size"] else "a group a row")
