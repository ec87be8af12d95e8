"""What a suite hands back: tables of contestants, printed, drawn and written as JSON from the same numbers.

    table = Table("batch 1", against="transformers", columns={"TTFT ms": ".1f"})
    table.add("ours", results["ours"], peer=results["theirs"], target=4.0, **{"TTFT ms": 3.2})
    table.missing("llama2-py", "pip install '.[peers]'")
    show([table], console)

    batch 1         tokens/s   (middle half)   x transformers   target   TTFT ms
    ours             4,100.0   (4,012-4,170)             4.31    >= 4        3.2
    llama2-py      not installed: pip install '.[peers]'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.benches.rounds import quartiles, times
from scripts.charts import bars, one_below_another
from starter.base.console import Console


@dataclass
class Row:
    """A contestant. ``values`` are its rounds; ``ratio`` is against whom the table says, ``target`` what it should be
    at least; ``cells`` are the table's further columns; ``remark`` stands in place of what could not be measured."""

    name: str
    values: Sequence[float] = ()
    ratio: float | None = None
    target: float | None = None
    cells: Mapping[str, float | None] = field(default_factory=dict)
    remark: str = ""


@dataclass
class Table:
    """Rows under one title. ``columns`` are the further ones, heading -> format of its numbers."""

    title: str
    unit: str = "tokens/s"
    against: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, values: Sequence[float], peer: Sequence[float] | None = None,
            target: float | None = None, **cells: float | None) -> None:
        """A contestant that was measured, and how many times ``peer`` it is."""
        self.rows.append(Row(name, values, times(values, peer) if peer else None, target, cells))

    def missing(self, name: str, command: str) -> None:
        """One that was not, and how to get it."""
        self.rows.append(Row(name, remark=f"not installed: {command}"))

    def lines(self) -> list[str]:
        """As text, its columns as wide as their widest cell."""
        heads = ["", self.unit, "(middle half)", f"x {self.against}", "target", *self.columns]
        cells = [self._cells(row) for row in self.rows if row.values]
        used = [i for i in range(len(heads)) if not i or any(row[i] for row in cells)]
        widths = {i: max(len(row[i]) for row in [heads, *cells]) for i in used}
        widths[0] = max(len(self.title), *(len(row.name) for row in self.rows))
        measured = iter(cells)
        lines = ["   ".join([self.title.ljust(widths[0]), *(heads[i].rjust(widths[i]) for i in used[1:])])]
        for row in self.rows:
            shown = [row.remark] if not row.values else [cell.rjust(widths[i])
                                                         for i, cell in enumerate(next(measured)) if i in used[1:]]
            lines.append("   ".join([row.name.ljust(widths[0]), *shown]).rstrip())
        return lines + self.notes

    def _cells(self, row: Row) -> list[str]:
        low, middle, high = quartiles(row.values)
        return [row.name, number(middle), f"({number(low)}-{number(high)})",
                "" if row.ratio is None else f"{row.ratio:.2f}", aim(row),
                *(format(row.cells[heading], form) if row.cells.get(heading) is not None else ""
                  for heading, form in self.columns.items())]


def aim(row: Row) -> str:
    """Its target, and whether it was missed."""
    if row.target is None or row.ratio is None:
        return ""
    return f">= {row.target:g}" + ("" if row.ratio >= row.target else ", missed")


def number(value: float) -> str:
    """Four digits, more or less."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show(tables: Iterable[Table], console: Console) -> None:
    """Print all."""
    for table in tables:
        console.line()
        for line in table.lines():
            console.line(line)


def picture(tables: Iterable[Table]) -> str:
    """All that was measured, as SVG: a group of bars for each table."""
    spreads = {f"{table.title}, {table.unit}": {row.name: quartiles(row.values) for row in table.rows if row.values}
               for table in tables}
    return one_below_another([chart(title, spread) for title, spread in spreads.items() if spread])


def chart(title: str, spread: Mapping[str, tuple[float, float, float]]) -> str:
    """A bar for each name, as ``quartiles`` gives its rounds."""
    return bars(title, {name: middle for name, (_, middle, _) in spread.items()},
                {name: (low, high) for name, (low, _, high) in spread.items()})


def document(suite: str, machine: Mapping[str, Any], tables: Iterable[Table]) -> dict[str, Any]:
    """Everything, for ``json.dumps``."""
    return {"suite": suite, "machine": dict(machine), "tables": [asdict(table) for table in tables]}
