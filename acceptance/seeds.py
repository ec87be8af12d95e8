"""A seed that somebody gave, as the same text on every system.

    plain_seed(given)    given: what stood behind --seed; "-" reads the first line of standard input

What a system's locale makes of the bytes of a command line or a pipe differs; the bytes do not, and are read as UTF-8.
"""

from __future__ import annotations

import os
import sys


def plain_seed(given):
    """The text, or None if none was given. ValueError for bytes that are no UTF-8."""
    if given == "-":
        stream = getattr(sys.stdin, "buffer", None)
        raw = stream.readline() if stream else sys.stdin.readline().encode("utf-8", errors="surrogateescape")
    else:
        given = given or ""
        raw = os.fsencode(given) if os.name == "posix" else given.encode("utf-8", errors="surrogatepass")
    try:
        return raw.decode("utf-8-sig").strip() or None
    except UnicodeDecodeError:
        raise ValueError("--seed is not in UTF-8: give it as UTF-8, as PowerShell does with "
                         "$OutputEncoding = [Text.UTF8Encoding]::new(), or take a seed of letters and digits") from None
