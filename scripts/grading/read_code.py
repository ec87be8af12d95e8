"""Reads the code of a submission: python3 read_code.py STARTER GIVEN TEACHER, prints lines of JSON.

    ["notes", [sentences]]      what the marker should look at (``look.py``)
    ["numbers", [integers]]     of its fingerprint (``similarity.py``), a thousand a line
    ["done"]                    all of it was read

The code is the teacher's, the files are a student's: ``grade.py`` runs this in the sandbox and for a limited time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PART = 1_000
MOST = 200_000  # numbers; an engine has some thousands
NOTES, LONGEST = 500, 400  # sentences, and characters of each


def main(starter: Path, given: Path, teacher: Path) -> None:
    sys.path.insert(0, str(teacher))
    from scripts.grading.look import look
    from scripts.grading.similarity import fingerprint
    notes = look(starter, teacher / "starter", teacher)
    if len(notes) > NOTES:
        notes[NOTES:] = [f"and {len(notes) - NOTES} more such lines"]
    print(json.dumps(["notes", [note[:LONGEST] for note in notes]]), flush=True)
    numbers = sorted(fingerprint(starter, given).numbers)[:MOST]
    for start in range(0, len(numbers), PART):
        print(json.dumps(["numbers", numbers[start:start + PART]]))
    print(json.dumps(["done"]))


if __name__ == "__main__":
    main(*(Path(place).resolve() for place in sys.argv[1:]))
