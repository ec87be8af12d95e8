"""M6 · Pictures for notebooks: what an engine's objects show as the last line of a cell.

    engine.kv                 page_pool: a box for each page, in its owner's colour, with a bar as long as it is full
    engine.step()             schedule: the chunks against the budget, and why each request got what it got
    engine.timeline           gantt: which requests waited, computed and were preempted, step by step
    engine, engine.metrics(), quantize(rows, config)      ... and likewise
    quantization_error(quantized, rows)                   a group's numbers and the grid points they become

A notebook asks an object for ``_repr_html_``; these functions answer in HTML and inline SVG, without scripts or style
sheets. Text and lines have the page's own colour (``currentColor``), and every fill goes with black text, so that the
pictures fit light and dark pages. Text from requests is escaped. The same object gives the same picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil
from typing import TYPE_CHECKING
from zlib import crc32

from starter.errors import QuantizationError, SchemaError
from starter.observe.report import PHASES, build_model
from starter.scheduler import ScheduleDecision, counted

if TYPE_CHECKING:
    from starter.base.statistics import Summary
    from starter.engine import InferenceEngine
    from starter.kv_cache import KVCacheManager
    from starter.metrics import Metrics
    from starter.quantization import QuantizedTensor
    from starter.timeline import Timeline

HUES = ("#7fb5e6", "#f2b84b", "#6cc5a4", "#f09cc7", "#d69a63", "#a9dcff", "#c88bd0", "#9fe0a8", "#a9b2f8", "#c9c46b")
PHASE_HUES = dict(zip(PHASES, ("#b9b9b4", "#7fb5e6", "#6cc5a4", "#f0a05a", "#dcdcd6")))
MAX_PAGES, MAX_ROWS, MAX_BOXES = 512, 60, 32  # shown: pages, requests, groups of a matrix each way
COLUMNS = 16  # pages in a line


class Picture(str):
    """HTML that a notebook renders."""

    def __repr__(self) -> str:
        return f"<Picture: {len(self)} characters of HTML>"

    def _repr_html_(self) -> str:
        return str(self)


# --------------------------------------------------------------------------------------------- the engine


def engine_card(engine: InferenceEngine) -> str:
    """The settings in a line, live requests, the page pool."""
    settings, states = engine.settings, [engine.status(request_id) for request_id in engine.active]
    line = (f"{engine.model.backend.name} backend, step {engine.steps}: budget {settings.budget_tokens} tokens a step, "
            f"at most {settings.max_running} running, {settings.batching} batching, {settings.policy}")
    rows = [(s.request_id, s.state, s.prompt_tokens, s.generated_tokens) for s in states]
    requests = _table(("request", "state", "prompt tokens", "generated"), rows) if rows else ""
    return f"{_line('InferenceEngine', line)}{requests}{page_pool(engine.kv)}"


def page_pool(kv: KVCacheManager) -> str:
    """A box for each page: its owner's colour, and a dark bar at its foot as long as it is full; then block tables."""
    shown = min(kv.total_pages, MAX_PAGES)
    pages = [kv.page(page) for page in range(shown)]
    tables, size = list(kv._tables), kv.page_size
    fills = dict.fromkeys(kv._pool.cached, size)  # tokens in each page
    for table in tables:
        fills.update((page, min(max(table.length - i * size, 0), size)) for i, page in enumerate(table.pages))
    hues = colours(table.request_id for table in tables)
    boxes = []
    for number, page in enumerate(pages):
        x, y = number % COLUMNS * 44 + 1, number // COLUMNS * 38 + 1
        tokens = fills.get(number, 0)
        owners = list(dict.fromkeys(page.users))
        about = f"page {number}: {page.state}" + (f" by {', '.join(owners)}" if owners else "")
        boxes.append(f"<g><title>{escape(about)}, {counted(tokens, 'token')}</title>"
                     + _rect(x, y, 40, 34, "none", stroke=2 if page.refcount > 1 else 1,
                             dashed=page.state == "cached"))
        for i, owner in enumerate(owners):  # a shared page has a stripe for each owner
            boxes.append(_rect(x + i * 40 / len(owners), y, 40 / len(owners), 34, hues[owner]))
        if owners:
            boxes.append(_rect(x, y + 29, 40 * tokens / size, 5, "#111", opacity=0.6))
        mark = "" if page.refcount < 2 else f" ×{page.refcount}"
        boxes.append(_text(x + 20, y + 20, f"{number}{mark}", "middle", "#111" if owners else "currentColor",
                           1.0 if owners else 0.55) + "</g>")
    used = Counter(page.state for page in pages)
    line = (f"{kv.total_pages - kv.free_pages} of {counted(kv.total_pages, 'page')} of "
            f"{counted(kv.page_size, 'token')} used, {used['cached']} cached (dashed), "
            f"{kv.internal_fragmentation()} used slots empty")
    rows = [(_swatch(hues[table.request_id]), table.request_id, table.length,
             " ".join(map(str, table.pages)) if table.host_pages is None else "swapped out") for table in tables]
    more = f"<div>… and {kv.total_pages - shown} more pages</div>" if shown < kv.total_pages else ""
    return (_line("Pages", line) + _svg(COLUMNS * 44, ceil(shown / COLUMNS) * 38, "".join(boxes)) + more
            + (_table(("", "table of", "tokens", "pages, in the order of positions"), rows) if rows else ""))


def schedule(decision: ScheduleDecision) -> str:
    """The batch as a bar as long as the budget, and a line for each request: what it computes and why."""
    hues = colours(chunk.request_id for chunk in decision.chunks)
    budget, x, bars = max(decision.budget_tokens, 1), 0.0, []
    for chunk in decision.chunks:
        width = 640 * chunk.count / budget
        about = f"{chunk.request_id}: {counted(chunk.count, 'token')}, {chunk.phase}"
        bars.append(f"<g><title>{escape(about)}</title>{_rect(x + 1, 1, width, 22, hues[chunk.request_id], stroke=1)}"
                    f"{_text(x + width / 2 + 1, 17, str(chunk.count), 'middle', '#111')}</g>")
        x += width
    bars.append(_rect(1, 1, 640, 22, "none", stroke=1))
    doing = {chunk.request_id: f"{chunk.phase}, " + (f"positions {chunk.start} to {chunk.start + chunk.count - 1}"
                                                     if chunk.count > 1 else f"position {chunk.start}")
             for chunk in decision.chunks}
    known = dict.fromkeys((*doing, *decision.preempted, *decision.running, *decision.waiting))
    doing = {**dict.fromkeys(decision.waiting, "waits"), **dict.fromkeys(decision.preempted, "preempted"), **doing}
    reasons = decision.reasons
    rows = [(_swatch(hues.get(request, "none")), request, doing.get(request, "runs"),
             reasons.get(request, "")) for request in known]
    line = f"{decision.scheduled_tokens} of {counted(decision.budget_tokens, 'token')}"
    if decision.waiting_count > len(decision.waiting):
        line += f"; {decision.waiting_count} wait, of which {len(decision.waiting)} are listed"
    return _line(f"Step {decision.step}", line) + _svg(642, 24, "".join(bars)) + _table(
        ("", "request", "this step", "why"), rows)


def gantt(timeline: Timeline) -> str:
    """A line for each request, a column for each step."""
    try:
        model = build_model(timeline.events)
    except SchemaError as error:  # for example, the oldest events were dropped
        return _line("Timeline", f"{counted(timeline.recorded, 'event')}; no picture: {error}")
    requests = [request for request in model["requests"] if not request.get("outside")]
    frames = max(len(model["frames"]) - 1, 1)
    left, width = 8 + 7 * max([len(request["id"][:24]) for request in requests[:MAX_ROWS]], default=0), 600 / frames
    bars = []
    for row, request in enumerate(requests[:MAX_ROWS]):
        y = row * 18
        bars.append(_text(left - 8, y + 13, request["id"][:24], "end"))
        for first, last, phase in request["spans"]:
            about = f"{request['id']}: {PHASES[phase]}, steps {model['frames'][first]['step']} to " \
                    f"{model['frames'][last]['step']}"
            bars.append(f"<g><title>{escape(about)}</title>" + _rect(
                left + first * width, y + 2, (last - first + 1) * width, 14, PHASE_HUES[PHASES[phase]]) + "</g>")
        if "finished" in request:
            end = {"cancelled": "× cancelled", "error": "! error"}.get(request["reason"], f"{request['tokens']} tokens")
            bars.append(_text(left + request["finished"] * width + 4, y + 13, end, "start", opacity=0.7))
    more = f"; the first {MAX_ROWS} of {len(requests)} requests" if len(requests) > MAX_ROWS else ""
    legend = " ".join(f"{_swatch(hue)} {phase}" for phase, hue in PHASE_HUES.items())
    line = f"{counted(timeline.recorded, 'event')}, {counted(len(model['frames']) - 1, 'step')}{more}"
    return (_line("Timeline", line) + _svg(left + 700, 18 * len(requests[:MAX_ROWS]) + 2, "".join(bars))
            + f"<div>{legend}</div>")


def metrics_table(metrics: Metrics) -> str:
    """The most important metrics of ``metrics.py``; times in seconds of the engine's clock."""
    def times(summary: Summary) -> str:
        return "-" if summary.p50 is None else f"median {summary.p50:.4g}, mean {summary.mean:.4g}, " \
                                               f"largest {summary.max:.4g}"

    ended = ", ".join(f"{number} {reason}" for reason, number in metrics.finished.items() if number)
    used = "-" if metrics.batch_utilization is None else f"{metrics.batch_utilization:.0%} of the budget"
    empty = "-" if metrics.fragmentation_mean is None else f"{metrics.fragmentation_mean:.1f} slots a step"
    return _table(("metric", "value"), (
        ("requests", f"{metrics.submitted} submitted, {metrics.refused} refused; ended: {ended or 'none'}"),
        ("time to first token, s", times(metrics.ttft)), ("time per output token, s", times(metrics.tpot)),
        ("output", f"{metrics.output_tokens} tokens in {metrics.steps} steps"),
        ("computed", f"{metrics.computed_tokens} positions; {metrics.found_tokens} found in shared pages"),
        ("batch utilization", used), ("preemptions", metrics.preemptions),
        ("KV pages", f"{metrics.kv_pages} in use, peak {metrics.kv_peak_pages} ({metrics.kv_peak_bytes:,} bytes)"),
        ("internal fragmentation", empty), ("weights", f"{metrics.weight_bytes:,} bytes")))


# ------------------------------------------------------------------------------------------- quantization


def tensor_card(tensor: QuantizedTensor) -> str:
    """How often each code occurs, and each group's largest rounding error, half a step of its grid: darker is more."""
    rows, groups = tensor.shape[0], tensor.groups_per_row
    codes = Counter(code for r in range(rows) for code in tensor.row_codes(r))
    low = (-(2 ** (tensor.bits - 1)) + 1) if tensor.symmetric else 0
    joined = 2 ** (tensor.bits - 4)  # neighbouring codes in a bar: 16 of int8
    bars = Counter({(code - low) // joined: 0 for code in codes})
    for code, number in codes.items():
        bars[(code - low) // joined] += number
    tallest = max(bars.values())
    drawn = [f"<g><title>{low + bar * joined}: {number}</title>"
             + _rect(bar * 14 + 1, 91 - 90 * number / tallest, 12, 90 * number / tallest, HUES[0]) + "</g>"
             for bar, number in sorted(bars.items())]
    rows_shown, groups_shown = min(rows, MAX_BOXES), min(groups, MAX_BOXES)
    half_steps = [[tensor.scales[r * groups + g] / 2 for g in range(groups_shown)] for r in range(rows_shown)]
    most, side = max(map(max, half_steps)), 90 / max(rows_shown, 1)
    width = min(160 / groups_shown, 24)
    drawn += [f"<g><title>row {r}, group {g}: ±{half:.3g}</title>"
              + _rect(250 + g * width, 1 + r * side, width, side, HUES[1], opacity=0.1 + 0.9 * half / most) + "</g>"
              for r, line in enumerate(half_steps) for g, half in enumerate(line)]
    drawn += [_text(1, 107, f"codes {low} to {low + 2 ** tensor.bits - 1 - tensor.symmetric}"),
              _text(250, 107, f"half a step by row and group, at most {most:.3g}")]
    return _line("QuantizedTensor", repr(tensor)[len("<QuantizedTensor "):-1]) + _svg(560, 114, "".join(drawn))


def quantization_error(tensor: QuantizedTensor, rows: Sequence[Sequence[float]], row: int = 0, group: int = 0
                       ) -> Picture:
    """One group of a tensor and of the ``rows`` it was made from: the numbers above, their grid points below."""
    if not 0 <= group < tensor.groups_per_row:
        raise QuantizationError(f"group {group} of a row; a row has groups 0 to {tensor.groups_per_row - 1}")
    stats = tensor.error(rows)
    scale, zero, codes = list(tensor.groups(row))[group]
    start = group * (tensor.group_size or tensor.shape[1])
    pairs = list(zip(rows[row][start:start + len(codes)], (scale * (code - zero) for code in codes)))
    ends = [number for pair in pairs for number in pair]
    low, high = min(ends), max(ends)

    def place(number: float) -> float:
        return 20 + 600 * ((number - low) / (high - low) if high > low else 0.5)

    points = range(min(codes), max(codes) + 1)
    drawn = ['<path d="M20 70H620" stroke="currentColor" stroke-opacity="0.5"/>']
    drawn += [f'<path d="M{place(scale * (code - zero)):.1f} 66v8" stroke="currentColor" stroke-opacity="0.7"/>'
              for code in points]
    for number, becomes in pairs:
        drawn.append(f"<g><title>{number:.6g} becomes {becomes:.6g}</title>"
                     f'<path d="M{place(number):.1f} 24L{place(becomes):.1f} 70" stroke="{HUES[0]}"/>'
                     f'<circle cx="{place(number):.1f}" cy="22" r="4" fill="{HUES[0]}"/>'
                     f'<circle cx="{place(becomes):.1f}" cy="70" r="4" fill="{HUES[1]}"/></g>')
    drawn += [_text(20, 92, f"{low:.4g}"), _text(620, 92, f"{high:.4g}", "end")]
    line = (f"row {row}, group {group}: a step is {scale:.3g}; of the whole matrix the largest error is "
            f"{stats.max_abs:.3g}, the root mean square {stats.rmse:.3g} ({stats.relative:.2%} of the numbers')")
    return Picture(_line("Numbers and their grid points", line) + _svg(640, 98, "".join(drawn)))


# -------------------------------------------------------------------------------------------------- parts


def colours(owners: Iterable[str]) -> dict[str, str]:
    """A colour for each owner: the same in every picture, but the next free one where two would collide."""
    taken: dict[int, str] = {}
    for owner in sorted(set(owners)):
        first = crc32(owner.encode("utf-8", "surrogatepass")) % len(HUES)
        order = [(first + i) % len(HUES) for i in range(len(HUES))]
        taken[next((slot for slot in order if slot not in taken), len(taken))] = owner
    return {owner: HUES[slot % len(HUES)] for slot, owner in taken.items()}


def _line(title: str, text: str) -> str:
    return f"<div><b>{escape(title)}</b> · {escape(text)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Text on the left; cells that are a Picture stay what they are."""
    rows = list(rows)
    cells = [[cell if isinstance(cell, Picture) else escape(str(cell)) for cell in row] for row in rows[:MAX_ROWS]]
    lines = [f"<tr>{''.join(f'<td style={_LEFT}>{cell}</td>' for cell in row)}</tr>" for row in cells]
    more = f"<div>… and {len(rows) - MAX_ROWS} more</div>" if len(rows) > MAX_ROWS else ""
    return (f"<table><tr>{''.join(f'<th style={_LEFT}>{escape(name)}</th>' for name in head)}</tr>{''.join(lines)}"
            f"</table>{more}")


_LEFT = '"text-align:left"'


def _swatch(colour: str) -> Picture:
    return Picture(f'<svg width="12" height="12">{_rect(1, 1, 10, 10, colour, stroke=1)}</svg>')


def _svg(width: float, height: float, content: str) -> str:
    return (f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" font-size="12" '
            f'font-family="sans-serif" style="max-width:100%">{content}</svg>')


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: int = 0, dashed: bool = False,
          opacity: float = 1.0) -> str:
    line = f' stroke="currentColor" stroke-opacity="0.5" stroke-width="{stroke}"' if stroke else ""
    return (f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="{fill}"{line}'
            + (' stroke-dasharray="3 2"' if dashed else "") + (f' fill-opacity="{opacity:.2g}"' if opacity < 1 else "")
            + "/>")


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "currentColor",
          opacity: float = 1.0) -> str:
    return (f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}" fill="{fill}"'
            + (f' fill-opacity="{opacity:.2g}"' if opacity < 1 else "") + f">{escape(text)}</text>")
