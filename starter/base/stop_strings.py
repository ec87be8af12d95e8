"""M3 · Where the text of a request ends: it is cut where a stop string begins, however it is split into tokens.

    stop "CDE"      pushed   "A"   "BC"   "D"   "E"           pushed   "BC"   "D"   "X"
                    shown    "A"   "B"    ""    "" stopped    shown    "B"    ""    "CDX"
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a streamed text where a stop string begins: no character of the stop string is ever shown, and no other
    character is lost.

    Text that may be the beginning of a stop string is held back until that is decided. Of several stop strings the one
    that is complete first counts (of those, the one that began first), so the result does not depend on how the text
    was split into tokens. A push costs at most O(S * (S + pushed text)), with S the total length of the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """More text -> what may be shown now, and whether a stop string is complete, with which the text ends. One that
        is completed where the text may not end is text like any other."""
        if not self._stops:
            return text, False
        held, text = len(self._held), self._held + text  # one that ends within what is held was not to end the text
        ends = [(at + len(stop), at) for stop in self._stops
                if (at := text.find(stop, max(held - len(stop) + 1, 0))) >= 0]
        if ends and may_stop:
            self._held = ""
            return text[:min(ends)[1]], True  # the cut
        keep = max(self._overlap(text, stop) for stop in self._stops)
        shown, self._held = text[:len(text) - keep], text[len(text) - keep:]
        return shown, False

    def finish(self) -> str:
        """The text ended for another reason: what was held back is no stop string, and may be shown."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that is a proper beginning of the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
