"""The record of a run on a GPU: which fields it has, a file that replaces no other, and a summary to read.

    path = write(record, folder)        gpu-record.json and gpu-record.md; SchemaError if a field is missing or strange

docs/gpu.md says what each field means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from starter.base.strict_json import (
    Boolean,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    OneOf,
    Shape,
    Text,
    describe,
    pointer,
)
from starter.errors import SchemaError

KINDS = {"target": "RTX 4060 Ti under Windows", "gpu": "not the target card", "cpu": "rehearsal on CPU, no GPU"}
NAME = "gpu-record"


class Fields(Shape):
    """An object with exactly these fields."""

    def __init__(self, **fields: Shape) -> None:
        self.fields = fields

    def parse(self, value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(f"expected an object, not {describe(value)}", path)
        for name in {**self.fields, **value}:
            if name not in value or name not in self.fields:
                problem = "missing" if name in self.fields else f"unknown; allowed: {', '.join(self.fields)}"
                raise SchemaError(f"this key is {problem}", pointer(path, name))
        return {name: shape.parse(value[name], pointer(path, name)) for name, shape in self.fields.items()}

    def dump(self, value: Mapping[str, Any]) -> object:
        return {name: shape.dump(value[name]) for name, shape in self.fields.items()}

    def json_schema(self) -> dict[str, object]:
        return {"type": "object", "properties": {name: shape.json_schema() for name, shape in self.fields.items()},
                "required": list(self.fields), "additionalProperties": False}


COUNT, AMOUNT, WORDS, YES = Integer(0, 2**62), Number(0.0, 1e30), Text(1), Boolean()
MAYBE, MAYBE_COUNT, MAYBE_AMOUNT = Nullable(WORDS), Nullable(COUNT), Nullable(AMOUNT)
TIME: dict[str, Any] = {"repeats": COUNT, "median_s": AMOUNT, "lowest_s": AMOUNT, "highest_s": AMOUNT, "spread": AMOUNT}
SHAPE = Fields(
    version=Integer(1, 1), kind=OneOf(tuple(KINDS.values())), began=WORDS, seconds=AMOUNT,
    code=Fields(commit=MAYBE, kernels_sha256=Text(64, 64), engine_sha256=Text(64, 64)),
    machine=Fields(system=WORDS, system_version=WORDS, windows_build=MAYBE_COUNT, processor=Text(), python=WORDS,
                   numpy=MAYBE, warp=MAYBE, cuda_driver=MAYBE, cuda_toolkit=MAYBE, driver=MAYBE),
    card=Nullable(Fields(device=WORDS, name=WORDS, capability=WORDS, memory_bytes=COUNT, free_bytes=COUNT,
                         power_limit_w=MAYBE_AMOUNT, memory_clock_mhz=MAYBE_AMOUNT, bandwidth=MAYBE_AMOUNT)),
    kernel_checks=Fields(blocks=ListOf(COUNT), tests=COUNT, cases=MapOf(COUNT), tolerance=AMOUNT),
    kernels=ListOf(Fields(
        kernel=WORDS, case=WORDS, error=MAYBE_AMOUNT, tolerance=AMOUNT, runs=COUNT, runs_equal=YES, time=Fields(**TIME),
        bytes=COUNT, operations=COUNT, bytes_per_s=AMOUNT, of_bandwidth=MAYBE_AMOUNT, numpy=Nullable(Fields(**TIME)))),
    engine=ListOf(Fields(
        fixture=WORDS, form=WORDS, requests=COUNT, errors=ListOf(Text()), golden=COUNT, as_golden=COUNT, as_numpy=COUNT,
        kv_peak_pages=COUNT, kv_peak_bytes=COUNT, kv_peak_tail_bytes=COUNT, planned_bytes=COUNT, peak_bytes=COUNT,
        driver_peak_bytes=MAYBE_COUNT,
        logits=Nullable(Fields(largest=MAYBE_AMOUNT, rms=MAYBE_AMOUNT, compared=COUNT)), loss=MAYBE_AMOUNT,
        loss_of_backend_cpu=MAYBE_AMOUNT)),
    refused=Nullable(Fields(limit_bytes=COUNT, pages_error=MAYBE, served_after_pages=YES, request_error=MAYBE,
                            served_after_request=YES)),
    out_of_memory=Fields(
        in_the_runs=YES, injected=Nullable(Fields(ended=MAYBE, error=MAYBE, other_request_same=YES, served_after=YES)),
        real=Nullable(Fields(asked_bytes=COUNT, given=YES, error=MAYBE, served_after=YES))),
    speed=ListOf(Fields(model=WORDS, backend=WORDS, form=WORDS, phase=OneOf(("prefill", "decode")), batch=COUNT,
                        tokens=COUNT, **TIME, tokens_per_s=AMOUNT, bytes_per_s=MAYBE_AMOUNT)),
    errors=ListOf(Fields(part=WORDS, error=WORDS)))


def check_folder(folder: Path) -> None:
    """FileExistsError where a record lies already."""
    if (folder / f"{NAME}.json").exists():
        raise FileExistsError(f"{folder} holds a record already, which is not replaced; name another folder in "
                              f"P07_RECORD, or leave it out")


def write(record: dict[str, Any], folder: Path) -> Path:
    """Both files; returns the first. A strange record is an error once the file is there: no run should be lost."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    SHAPE.parse(record, "")
    (folder / f"{NAME}.md").write_text(summary(record), encoding="utf-8")
    return path


# ----------------------------------------------------------------------------------------------------- summary


def summary(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    machine, card, errors = record["machine"], record["card"], record["errors"]
    about = {"system": f"{machine['system']} {machine['system_version']}", "processor": machine["processor"],
             "Python, NumPy, Warp": ", ".join(map(str, (machine["python"], machine["numpy"], machine["warp"]))),
             "CUDA of the driver, of Warp": f"{known(machine['cuda_driver'])}, {known(machine['cuda_toolkit'])}",
             "driver": known(machine["driver"]), "card": known(card and card["name"])}
    if card:
        about |= {"compute capability": card["capability"], "memory": f"{card['memory_bytes']:,} bytes",
                  "power limit": f"{known(card['power_limit_w'])} W"}
    about |= {"commit": known(record["code"]["commit"]), "kernels": record["code"]["kernels_sha256"]}
    memory, refused = record["out_of_memory"], record["refused"]
    return "\n".join([
        f"# {record['kind']}", "", f"{record['began']}, {record['seconds']:.0f} seconds, "
        f"{len(errors) or 'no'} error{'s' * (len(errors) != 1)}.", "",
        *(f"- **{error['part']}**: {error['error']}" for error in errors), *([""] if errors else []),
        *table(("", ""), about.items()), "", "## Kernels", "",
        "Times of one launch; NumPy's are of the same in float32 on the processor.", "",
        *table(("kernel", "case", "error", "runs equal", "median", "spread", "GB/s", "of the card's", "NumPy"), (
            (row["kernel"], row["case"], small(row["error"]), f"{row['runs']}: {yes(row['runs_equal'])}",
             us(row["time"]), f"{row['time']['spread']:.0%}", f"{row['bytes_per_s'] / 1e9:.1f}",
             "" if row["of_bandwidth"] is None else f"{row['of_bandwidth']:.0%}",
             us(row["numpy"]) if row["numpy"] else "") for row in record["kernels"])),
        "", "## Engine", "",
        *table(("fixture", "form", "golden", "as NumPy", "logits off", "loss", "on the CPU", "K/V peak", "planned",
                "peak"), (
            (row["fixture"], row["form"], f"{row['as_golden']} of {row['golden']}" if row["golden"] else "",
             f"{row['as_numpy']} of {row['requests']}", small(row["logits"]["largest"]) if row["logits"] else "",
             *("" if loss is None else f"{loss:.4f}" for loss in (row["loss"], row["loss_of_backend_cpu"])),
             *(f"{row[name]:,}" for name in ("kv_peak_bytes", "planned_bytes", "peak_bytes")))
            for row in record["engine"])),
        "", "## Memory", "",
        f"- out of memory in these runs: {yes(memory['in_the_runs'])}",
        *([f"- too many pages: {refused['pages_error']}", f"- too long a request: {refused['request_error']}",
           f"- served afterwards: {yes(refused['served_after_pages'] and refused['served_after_request'])}"]
          if refused else []),
        *(f"- {name}: {memory[name]['error'] or 'the driver gave it'}; served afterwards: "
          f"{yes(memory[name]['served_after'])}" for name in ("injected", "real") if memory[name]),
        "", "## Speed", "",
        *table(("model", "backend", "form", "phase", "batch", "tokens/s", "median step", "spread", "GB/s"), (
            (row["model"], row["backend"], row["form"], row["phase"], row["batch"], f"{row['tokens_per_s']:.0f}",
             us(row), f"{row['spread']:.0%}", "" if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.2f}")
            for row in record["speed"])), ""])


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table."""
    head = tuple(head)
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def known(value: object) -> object:
    return "unknown" if value is None else value


def small(number: float | None) -> str:
    return "none" if number is None else f"{number:.1e}"


def finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if isfinite(number) else None


def yes(value: bool) -> str:
    return "yes" if value else "no"


def us(time: Mapping[str, float]) -> str:
    return f"{time['median_s'] * 1e6:,.1f} µs"
