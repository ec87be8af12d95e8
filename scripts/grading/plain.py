"""Text that comes from a submission, as it may be shown: no control characters, and not without end.

    clean(text)              line ends and tabs stay; every other control character is shown as its escape (\\x1b)
    bounded(text, most)      at most so many bytes of UTF-8: the beginning, what was left out, the end
    one_line(text)           for names: no line ends either

and ``warning``, what every output of a grade begins with.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Cf: turns the direction of writing; Cs: half a character


def clean(text: str) -> str:
    """A terminal obeys none of it."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in CONTROL else c.encode("unicode_escape").decode()
                   for c in text)


def bounded(text: str, most: int) -> str:
    """Both ends of a text that is too long; the first third and the last two, where the cause of a failure stands."""
    raw = text.encode("utf-8", errors="backslashreplace")
    if len(raw) <= most:
        return text
    note = f"\n... {len(raw) - most} bytes left out ...\n"
    room = max(0, most - len(note))
    head, tail = raw[:room // 3], raw[len(raw) - (room - room // 3):]
    return head.decode(errors="ignore") + note + tail.decode(errors="ignore")


def one_line(words: str) -> str:
    """Without line ends and other control characters, which names of files may hold."""
    return "".join("?" if unicodedata.category(c) in CONTROL else c for c in words)


def warning(unsafe: bool, part: Iterable[str]) -> str:
    """What every output begins with, "" if there is nothing to say."""
    said = ["UNSAFE: graded without namespaces, so that a submission could have read and changed what the grader can"]
    words = ", ".join(part)
    return "; ".join(said * unsafe + [f"A PART of the tests only ({words}): what was not run counts as failed"
                                      ] * bool(words))
