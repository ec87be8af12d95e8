"""The process in which the submission runs while the judge asks: python3 worker.py TREE.

Its standard input and output are the wire; what the submission prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress
from pathlib import Path

from wire import Gone
from worker_wire import WorkerWire


def main(tree):
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    sys.path.insert(0, tree)
    faulthandler.enable()  # after a crash standard error says where in Python it was
    with suppress(Gone):  # the judge has heard enough
        WorkerWire(reader, writer).serve()


if __name__ == "__main__":
    main(sys.argv[1])
