"""The M6 report: what runs, benchmarks and quantization came to, in Markdown whose every number names its file.

    python3 starter/driver.py --fixture fixtures/tiny_model.json --timeline cached.jsonl
    python3 starter/driver.py --fixture fixtures/tiny_model.json --timeline uncached.jsonl --no-cache
    python3 scripts/bench.py --suite ladder --json bench.json
    python3 scripts/quant_report.py --json quantized.json
    python3 scripts/report.py uncached.jsonl cached.jsonl bench.json quantized.json -o REPORT.md
    python3 scripts/report.py --check REPORT.md

A number is a link, its address the file it came from, its title what it is there:

    [6.0 steps](cached.jsonl "TTFT, median")

Put such links into sentences of your own, too. ``--check`` takes them all, wherever they stand, works each out again
from its file, draws the pictures again, and names the first that differs, or that stands in a table without a file.
Made again, a report gets new figures between its two marks; what you wrote around them stays.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import unescape
from pathlib import Path
from urllib.parse import quote, unquote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.benches.rounds import quartiles
from scripts.benches.tables import chart as spread_chart
from scripts.charts import bars, lines
from scripts.figures import Source, read_source
from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, guarded, run_program
from starter.errors import SchemaError
from starter.schema import EngineSettings

BEGIN = "<!-- figures of scripts/report.py: making them again replaces what stands from here to the other mark -->"
END = "<!-- end of the figures -->"
TEMPLATE = f"""# Report

<!-- Your words: what was tried, on which machine, and what you expected. -->

{BEGIN}
{END}

## What it means

<!-- Your words: what did each step gain, what did it cost in memory or accuracy, and what surprised you? -->
"""
LINK = re.compile(r'(!?)\[([^\[\]\n]*)\]\(([^()\s"]+\.(?:jsonl?|svg)) "([^"\n]*)"\)')
RUN = ("TTFT, median", "TTFT, p90", "TTFT, largest", "TPOT, median", "TPOT, largest", "queue, largest", "steps",
       "output tokens", "output tokens/s", "positions computed", "prompt tokens found", "batch utilization",
       "most requests in a step", "preemptions", "KV pages, peak", "KV bytes, peak", "empty slots, mean",
       "weight bytes", "requests", "refused", "outputs")
SETUP = ("model", "weights sha256", "weight quantization", "engine", "backend", "clock",
         *(name.replace("_", " ") for name in EngineSettings.__dataclass_fields__))
SPEED = ("tokens/s", "middle half", "x llama2-py", "x transformers", "engine's own time")
QUALITY = ("weight bytes", "of float32", "KV bytes a token", "rms error", "largest error", "change of logits", "loss",
           "change of loss", "keeps the form", "differs at", "tokens/s")
NOTE = ("Figures as `starter/metrics.py` defines them. *outputs*: how many requests and samples ended by themselves, "
        "and a digest of their tokens; equal digests are equal outputs.")
WAIT = ": TTFT"
MAX_REQUESTS = 40  # that have a line of their own


# ------------------------------------------------------------------------------------------------ writing


class Page:
    """The figures of a report that will stand in ``target``: Markdown, and the pictures beside it."""

    def __init__(self, sources: Sequence[Source], target: Path) -> None:
        self._target = target
        self._named = {source.path.name: source for source in sources}
        if len(self._named) < len(sources):
            raise SchemaError("two of the files have the same name, which tables go by; rename one")
        self.pictures: dict[Path, str] = {}
        self._parts: list[str] = []
        self._table("Sources", "file", list(self._named), ("sha256",), lambda name, figure: (self._named[name], figure))
        if runs := {name: source for name, source in self._named.items() if source.kind == "timeline"}:
            self._runs(runs)
        for name, source in self._named.items():
            if source.kind == "bench":
                self._bench(name, source)
            elif source.kind == "tables":
                self._tables(name, source)
            elif source.kind == "quantization":
                self._quantization(name, source)

    def markdown(self) -> str:
        """All of it."""
        return "\n".join(self._parts)

    def _runs(self, runs: Mapping[str, Source]) -> None:
        names, sources = list(runs), list(runs.values())
        self._table("What the runs came to", "figure", RUN, names, lambda figure, name: (runs[name], figure))
        self._parts += [NOTE, ""]
        for chart in ("pages", "batch", "work"):
            self._picture(chart, sources)
        waits = list(dict.fromkeys(figure for source in sources for figure in source.figures
                                   if figure.endswith(WAIT)))[:MAX_REQUESTS]
        self._table("Time to first token of each request", "request", waits, names,
                    lambda figure, name: (runs[name], figure), lambda figure: figure[:-len(WAIT)])
        self._table("How the runs were set up", "setting", SETUP, names, lambda figure, name: (runs[name], figure))

    def _bench(self, name: str, source: Source) -> None:
        self._environment(name, source, ("Python", "system", "cores", "packages"))
        for shape, found in source.data["shapes"].items():
            self._table(f"{name}: speed in the {shape} shape", "", list(found["tokens_per_second"]), SPEED,
                        partial(_entry, source, shape))
            self._picture(f"speed-{shape}", [source])

    def _tables(self, name: str, source: Source) -> None:
        self._environment(name, source, ("Python", "system", "cores", "packages"))
        for number, table in enumerate(source.data["tables"]):
            columns = [table["unit"], "middle half", f"x {table['against']}", *table["columns"]]
            self._table(f"{name}: {table['title']}", "", [row["name"] for row in table["rows"]], columns,
                        partial(_entry, source, table["title"]))
            self._picture(f"table-{number}", [source])

    def _quantization(self, name: str, source: Source) -> None:
        self._environment(name, source, ("poems", "samples"))
        self._table(f"{name}: what quantization costs and saves", "", [row["name"] for row in source.data["rows"]],
                    QUALITY, lambda row, column: (source, f"{row}: {column}"))
        self._picture("quantization", [source])

    def _environment(self, name: str, source: Source, figures: Sequence[str]) -> None:
        self._table(f"{name}: how it was measured", "", figures, (name,), lambda figure, _: (source, figure))

    def _table(self, title: str, corner: str, rows: Sequence[str], columns: Sequence[str],
               cell: Callable[[str, str], tuple[Source, str]], label: Callable[[str], str] = str) -> None:
        """``cell(row, column)`` is the source and the name of a figure; where it has none, the cell is "-"."""
        self._parts += [f"### {_plain(title)}", "", _line([corner, *map(_plain, columns)]),
                        _line(["---", *["---:" for _ in columns]])]
        self._parts += [_line([_plain(label(row)), *(self._link(*cell(row, column)) for column in columns)])
                        for row in rows]
        self._parts.append("")

    def _link(self, source: Source, figure: str) -> str:
        text = source.figures.get(figure, "-")
        return text if text == "-" else f'[{_plain(text)}]({address(source.path, self._target)} "{_plain(figure)}")'

    def _picture(self, chart: str, sources: Sequence[Source]) -> None:
        """Its title lists the files that it was drawn from."""
        path = self._target.with_name(f"{self._target.stem}.{chart}.svg")
        self.pictures[path] = draw(chart, sources)
        files = " ".join(address(source.path, self._target) for source in sources)
        self._parts += [f'![{_plain(chart)}]({address(path, self._target)} "{files}")', ""]


def draw(chart: str, sources: Sequence[Source]) -> str:
    """A picture by its name, as SVG."""
    if chart == "quantization":
        from scripts.quant_report import Row, drawing  # much to load, for this picture alone
        return drawing([Row(**row) for row in sources[0].data["rows"]])
    if chart.startswith("table-"):
        table = sources[0].data["tables"][int(chart[len("table-"):])]
        return spread_chart(f"{table['title']}, {table['unit']}",
                            {row["name"]: quartiles(row["values"]) for row in table["rows"] if row["values"]})
    if chart.startswith("speed-"):
        results = sources[0].data["shapes"][chart[len("speed-"):]]["tokens_per_second"]
        middle = {name: quartiles(values) for name, values in results.items()}
        medians = {name: median for name, (_, median, _) in middle.items()}
        return bars("tokens a second, median and middle half", medians,
                    {name: (low, high) for name, (low, _, high) in middle.items()})
    steps = {source.path.name: [event for event in source.data if event["event"] == "step"] for source in sources}
    if chart == "pages":
        return lines("KV pages in use", {name: [e["used_pages"] for e in events] for name, events in steps.items()})
    if chart == "batch":
        return lines("requests in a step", {name: [len(e["chunks"]) for e in events] for name, events in steps.items()})
    if chart == "work":
        return bars("positions that went through the model",
                    {name: sum(e["computed"] for e in events) for name, events in steps.items()})
    raise SchemaError(f"there is no picture {chart!r}")


def address(path: Path, report: Path) -> str:
    """How a link in the report leads to a file."""
    try:
        relative = Path(os.path.relpath(path.resolve(), report.resolve().parent)).as_posix()
    except ValueError:  # another drive
        relative = path.resolve().as_posix()
    return quote(relative, safe="/:")


def _entry(source: Source, title: str, row: str, column: str) -> tuple[Source, str]:
    """The source and the name of a figure in a table with this title."""
    return source, f"{title}, {row}: {column}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in a cell, a link or a title."""
    return re.sub(r"[\\|\[\]`*_~<>&\"'\n\r#!]", lambda match: f"&#{ord(match[0])};", text)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(sources: Sequence[Source], target: Path) -> None:
    """Write the report and its pictures; of a report that is there already, replace the figures alone."""
    text = target.read_text(encoding="utf-8") if target.exists() else TEMPLATE
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SchemaError(f"{target} has not the two marks between which figures go; choose another name, or add\n"
                          f"{BEGIN}\n{END}")
    page = Page(sources, target)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    target.write_text(f"{before}{BEGIN}\n\n{page.markdown()}\n{END}{after}", encoding="utf-8", newline="\n")
    for path, svg in page.pictures.items():
        path.write_text(svg, encoding="utf-8", newline="\n")


# ----------------------------------------------------------------------------------------------- checking


class Checker:
    """Takes a report's numbers from their files again."""

    def __init__(self, report: Path, progress: Callable[[str], None]) -> None:
        self._report, self._progress = report, progress
        self._sources: dict[str, Source] = {}
        self.checked = 0

    def first_wrong(self) -> str | None:
        """A sentence about the first number or picture that is not what its file says; None: all are."""
        rows = self._report.read_text(encoding="utf-8").split("\n")
        for number, (line, below) in enumerate(zip(rows, [*rows[1:], ""]), start=1):
            for picture, text, target, title in LINK.findall(line):
                if problem := (self._picture(target, title) if picture else self._figure(unescape(text), target,
                                                                                         unescape(title))):
                    return f"{self._report}, line {number}: {problem}"
                self.checked += 1
            if not below.startswith("| ---") and (bare := _bare_number(line)):  # heads may say "int8" or "p90"
                return f"{self._report}, line {number}: {bare!r} names no file that it comes from"
        return None

    def _figure(self, text: str, target: str, name: str) -> str | None:
        figure = self._source(target).figures.get(name)
        if figure is None:
            return f"{unquote(target)} has no figure {name!r}"
        return None if figure == text else f"{name!r} is {figure} in {unquote(target)}, not {text}"

    def _picture(self, target: str, title: str) -> str | None:
        path = self._report.parent / unquote(target)
        chart = path.name.removeprefix(f"{self._report.stem}.").removesuffix(".svg")
        drawn = draw(chart, [self._source(file) for file in title.split()])
        same = path.is_file() and path.read_text(encoding="utf-8") == drawn
        return None if same else f"the picture {path.name} is not what {unquote(title)} comes to"

    def _source(self, target: str) -> Source:
        if target not in self._sources:
            self._progress(f"reading {unquote(target)} ...")
            self._sources[target] = read_source(self._report.parent / unquote(target))
        return self._sources[target]


def _bare_number(line: str) -> str | None:
    """A cell of a table, other than its first, with a digit that stands in no link."""
    if not line.startswith("|"):
        return None
    cells = [cell.strip() for cell in unescape(LINK.sub("", line)).split("|")[2:-1]]
    return next((cell for cell in cells if re.search(r"\d", cell)), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a timeline (.jsonl) or a JSON file of figures")
    parser.add_argument("-o", "--output", default="REPORT.md", metavar="REPORT.md")
    parser.add_argument("--check", metavar="REPORT.md", help="work out its numbers again, write nothing")
    options = parser.parse_args(arguments)
    if bool(options.runs) == bool(options.check):
        parser.error("give the files to report on, or --check and a report")
    return guarded(lambda: check(Path(options.check)) if options.check else
                   make([Path(run) for run in options.runs], Path(options.output)))


def make(paths: Sequence[Path], target: Path) -> int:
    """Read, then write."""
    sources = []
    with Console(sys.stderr).working() as progress:
        for path in paths:
            progress(f"reading {path} ...")
            sources.append(read_source(path))
        write(sources, target)
    Console(sys.stdout).line(f"{target}: python3 scripts/report.py --check {target} works its numbers out again")
    return EXIT_OK


def check(report: Path) -> int:
    """Say what is wrong first, or how much is right."""
    with Console(sys.stderr).working() as progress:
        checker = Checker(report, progress)
        problem = checker.first_wrong()
    Console(sys.stdout).line(problem or f"{checker.checked} numbers and pictures are what their files say")
    return EXIT_DIFFERS if problem else EXIT_OK


if __name__ == "__main__":
    run_program(main)
