"""M6 · Public request traces: when requests arrived and how long they were. They hold no text.

    Azure LLM inference trace 2023 (CSV, lines end in CRLF; Patel et al. 2024, "Splitwise")
        TIMESTAMP,ContextTokens,GeneratedTokens
        2023-11-16 18:17:03.9799600,4808,10
    Mooncake (JSON Lines; Qin et al. 2025): one id for each block of 512 prompt tokens, equal where they are equal
        {"timestamp": 3000, "input_length": 1040, "output_length": 500, "hash_ids": [0, 14, 15]}

``draw.requests_from_trace`` makes requests from the rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path

from starter.base.strict_json import Integer, ListOf, Record, parse_json
from starter.errors import SchemaError

BLOCK = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_ROW = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?,(\d{1,7}),(\d{1,7})", re.ASCII)


@dataclass(frozen=True)
class TraceRow:
    """A request as Mooncake writes it. ``timestamp``: exact milliseconds since an origin that the trace chooses."""

    timestamp: Fraction | int
    input_length: int
    output_length: int
    hash_ids: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.hash_ids) * BLOCK < self.input_length:
            raise SchemaError(f"{len(self.hash_ids)} ids, each for {BLOCK} tokens, are too few for {self.input_length}",
                              "/hash_ids")


_MOONCAKE_ROW = Record(TraceRow, {
    "timestamp": Integer(0, 2**53),
    "input_length": Integer(0, 9_999_999),
    "output_length": Integer(0, 9_999_999),
    "hash_ids": ListOf(Integer(0, 2**63 - 1), 1),
})


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRow]:
    """The first ``limit`` rows, all by default; the rest of the file is not read.

    SchemaError if there is no row; for anything malformed it names file and line, and its ``path`` points into a
    Mooncake row. O(rows).
    """
    rows: list[TraceRow] = []
    number, azure = 0, False
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8").strip()
                if number == 1 and line[:1] != "{":
                    azure = line == AZURE_HEADER
                    if not azure:
                        raise SchemaError(f"neither {AZURE_HEADER} nor an object of Mooncake's JSON Lines")
                elif line:
                    rows.append(_azure_row(line, number) if azure else _MOONCAKE_ROW.parse(parse_json(line), ""))
                if len(rows) == limit:
                    break
    except OSError as error:
        raise SchemaError(f"cannot read {path}: {error.strerror or error}") from None
    except SchemaError as error:
        raise SchemaError(f"{path}, line {number}: {error.problem}", error.path) from None
    except ValueError as error:  # not UTF-8, or a date that does not exist
        raise SchemaError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise SchemaError(f"{path} holds no request")
    return rows


def _azure_row(line: str, number: int) -> TraceRow:
    if not (match := _AZURE_ROW.fullmatch(line)):
        raise SchemaError(f"not of the form {AZURE_HEADER}, as in 2023-11-16 18:17:03.9799600,4808,10")
    second, fraction, prompt, output = match.groups()
    milliseconds = (datetime.fromisoformat(second) - datetime.min) // timedelta(milliseconds=1)
    blocks = int(prompt) // BLOCK + 1
    ids = range(number << 20, (number << 20) + blocks)  # of this row alone: which prefixes are shared is unknown
    return TraceRow(milliseconds + 1000 * Fraction(f"0{fraction or '.0'}"), int(prompt), int(output), ids)
