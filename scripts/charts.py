"""Charts as SVG: bars, with the middle half of their values as a whisker; lines over steps; several in one picture.

An SVG follows the light or dark mode of the page that shows it. The same numbers give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LABELS, ROW = 720, 230, 26  # of the picture; of the names left of the bars; height of a bar's row
HUES = ("#2a78b8", "#d1761b", "#2f9474", "#b0508f", "#8a7a1d", "#6a6fd0")
GAP = 14  # between charts
STYLE = ("<style>text{font:12px sans-serif;fill:#333}path{stroke:#333;fill:none}"
         "@media(prefers-color-scheme:dark){text{fill:#ddd}path{stroke:#ddd}}</style>")
_HEIGHT = re.compile(rf'viewBox="0 0 {WIDTH} (\d+)"')


def bars(title: str, values: Mapping[str, float], whiskers: Mapping[str, tuple[float, float]] | None = None) -> str:
    """A bar for each name; ``whiskers`` are (low, high)."""
    highest = max([*values.values(), *(high for _, high in (whiskers or {}).values())], default=0.0) or 1.0
    scale = (WIDTH - LABELS - 90) / highest
    parts = [_text(0, 16, title, bold=True)]
    for row, (name, value) in enumerate(values.items()):
        y = 28 + row * ROW
        low, high = (whiskers or {}).get(name, (value, value))
        parts += [_text(LABELS - 8, y + 15, name, "end"),
                  f'<rect x="{LABELS}" y="{y}" width="{value * scale:.1f}" height="18" fill="{HUES[0]}"/>',
                  _text(LABELS + max(value, high) * scale + 8, y + 15, _number(value))]
        if high > low:
            parts.append(f'<path d="M{LABELS + low * scale:.1f} {y + 9}H{LABELS + high * scale:.1f}"/>')
    return _svg(36 + len(values) * ROW, parts)


def lines(title: str, series: Mapping[str, Sequence[float]], x_label: str = "step") -> str:
    """A line for each name, its values at 0, 1, 2, ... on a common scale from 0."""
    highest = max((max(values, default=0.0) for values in series.values()), default=0.0) or 1.0
    longest = max(map(len, series.values()), default=0)
    across, up = (WIDTH - 60) / max(longest - 1, 1), 180 / highest
    parts = [_text(0, 16, title, bold=True), '<path d="M40 30V214H700"/>', _text(34, 38, _number(highest), "end"),
             _text(34, 214, "0", "end"), _text(700, 230, f"{x_label} {max(longest - 1, 0)}", "end")]
    for number, (name, values) in enumerate(series.items()):
        hue = HUES[number % len(HUES)]
        points = " ".join(f"{40 + x * across:.1f},{214 - y * up:.1f}" for x, y in enumerate(values))
        parts += [f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="1.5"/>',
                  f'<rect x="40" y="{238 + number * 18}" width="12" height="12" fill="{hue}"/>',
                  _text(58, 249 + number * 18, name)]
    return _svg(244 + len(series) * 18, parts)


def one_below_another(charts: Sequence[str]) -> str:
    """Charts of this module in one picture, in their order."""
    parts, height = [], 0
    for chart in charts:
        parts.append(chart.replace("<svg ", f'<svg y="{height}" ', 1).replace(STYLE + "\n", "").rstrip())
        height += int(_HEIGHT.search(chart)[1]) + GAP  # type: ignore[index]
    return _svg(max(height - GAP, 0), parts)


def _svg(height: int, parts: Sequence[str]) -> str:
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">', STYLE,
                      *parts, "</svg>", ""])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' style="font-weight:bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
