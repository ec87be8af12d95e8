"""M3 · Stop strings in streamed text: nothing of a stop string is ever shown, nothing else is ever lost.

    stop "CDE"      pushed   "A"   "BC"   "D"   "E"           pushed   "BC"   "D"   "X"
                    shown    "A"   "B"    ""    "" stopped    shown    "B"    ""    "CDX"

Text that may be the beginning of a stop string is held back until that is decided. When several stop strings could
match, the one that is complete first counts (of those, the one that began first), so that the result does not depend
on how the text was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text for stop strings. A push costs at most O(S * (S + pushed text)), S being their total length."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """More text -> what may be shown now, and whether a stop string was completed."""
        if not self._stops:
            return text, False
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[:min(ends)[1]], True
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        shown, self._held = text[:len(text) - keep], text[len(text) - keep:]
        return shown, False

    def finish(self) -> str:
        """The text has ended by itself: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that is a proper beginning of the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
