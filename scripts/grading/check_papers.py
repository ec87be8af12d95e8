"""Checks the papers of a submission as far as a program can: python3 check_papers.py FOLDER TEACHER, prints JSON.

    design      DESIGN.md: the words under each heading that are not the template's; headings that are missing or empty
    timelines   every *.jsonl: is it a timeline, does it keep its promises (``starter check``), and are its greedy
                tokens those that its model gives
    figures     every Markdown file with linked figures: the first figure that its source does not give
                (scripts/report.py)

The checks are the teacher's code, the files are a student's, so ``grade.py`` runs this in the sandbox and for a limited
time. It awards no points: it shows the marker where to look, and which line of the rubric gets 0.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
ENOUGH = 25  # words (or Chinese characters) under a heading
MANY = 20  # files of a kind; more are not read
SHORT = 32  # tokens of a request that is computed again
TRIED = 2  # such requests of a timeline
LONGEST = 500  # characters of a sentence, or of a heading
HEADINGS = 200  # that are listed
SECTIONS = ("Layout", "Lifecycles", "Choices", "Sources", "Measurements", "Failure cases")


def main(folder, teacher):
    sys.path.insert(0, str(teacher))
    print(json.dumps({"design": design(folder, teacher), "timelines": timelines(folder), "figures": figures(folder)}))


def design(folder, teacher):
    """{"words": {heading: words}, "missing": [...], "empty": [...]}."""
    path = folder / "DESIGN.md"
    if not path.is_file():
        return {"words": {}, "missing": list(SECTIONS), "empty": [], "problem": "there is no DESIGN.md"}
    template = teacher / "docs" / "DESIGN.template.md"
    known = set(template.read_text(encoding="utf-8").splitlines()) if template.is_file() else set()
    words = sections(path.read_text(encoding="utf-8", errors="replace"), known)
    found = {heading.lower(): number for heading, number in words.items()}
    missing = [name for name in SECTIONS if not any(name.lower() in heading for heading in found)]
    empty = [name for name in SECTIONS if name not in missing
             and max(number for heading, number in found.items() if name.lower() in heading) < ENOUGH]
    blank = not any(number >= ENOUGH for number in words.values())
    words = {heading[:LONGEST]: number for heading, number in list(words.items())[:HEADINGS]}
    return {"words": words, "missing": missing, "empty": empty,
            "problem": "it is the blank template" if blank else ""}


def sections(text, known=()):
    """{heading: words under it, those under its subheadings included}. Comments, "..." and known lines do not count."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    counts: dict[str, int] = {}
    open_ones: list[tuple[int, str]] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (found := HEADING.match(line)):
            level = len(line) - len(line.lstrip("#"))
            open_ones = [(at, name) for at, name in open_ones if at < level] + [(level, found.group(1))]
            counts.setdefault(found.group(1), 0)
        elif line not in known:
            number = len(re.findall(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+", line))
            for _, name in open_ones:
                counts[name] += number
    return counts


def timelines(folder):
    """Of each timeline, by file: {"events", "violations", "wrong": sentences}."""
    from starter.errors import EngineError
    from starter.observe.audit import Audit
    from starter.observe.timeline_file import read_timeline
    found = {}
    for path in sorted(folder.rglob("*.jsonl"))[:MANY]:
        name = path.relative_to(folder).as_posix()
        try:
            events = read_timeline(path)
            audit = Audit.of(events)
            wrong = [str(violation) for violation in audit.violations[:5]]
            wrong += false_tokens(events, path.parent)
            found[name] = {"events": len(events), "violations": len(audit.violations),
                           "wrong": [sentence[:LONGEST] for sentence in wrong]}
        except EngineError as error:
            found[name] = {"events": 0, "violations": 0, "wrong": [f"cannot be read: {error}"[:LONGEST]]}
        except Exception as error:  # the file is a student's: any failure is a finding
            problem = f"breaks the check: {type(error).__name__}: {error}"[:LONGEST]
            found[name] = {"events": 0, "violations": 0, "wrong": [problem]}
    return found


def false_tokens(events, folder):
    """A sentence for each short greedy request whose tokens are not those of the model in the header."""
    from starter.errors import EngineError
    from starter.observe.replay import load_recorded
    from starter.reference import reference_generate
    header = events[0]
    if header["settings"].get("kv_quantization") or not header.get("weights"):
        return []
    told: dict[str, tuple[list[int], list[int]]] = {}
    for event in events:
        if event["event"] == "submit" and not event.get("sampling") and len(told) < 1_000:
            told[event["request"]] = (event["prompt_tokens"], [])
        elif event["event"] == "token" and event["request"] in told:
            told[event["request"]][1].append(event["token"])
    short = sorted((len(prompt) + len(tokens), name) for name, (prompt, tokens) in told.items() if tokens)[:TRIED]
    if not short:
        return []
    try:
        model = load_recorded(header, folder).model
    except EngineError as error:
        return [f"its model cannot be loaded: {error}"]
    wrong = []
    for length, name in short:
        prompt, tokens = told[name]
        if length <= SHORT and (right := list(reference_generate(model, prompt, len(tokens)))) != tokens:
            wrong.append(f"the tokens of {name} are {tokens[:8]}..., its model says {right[:8]}...")
    return wrong


def figures(folder):
    """Of each Markdown file with linked figures: {"links": how many, "wrong": a sentence or ""}."""
    from scripts.report import LINK, Checker
    from starter.errors import EngineError
    found = {}
    for path in sorted(folder.rglob("*.md"))[:MANY]:
        text = path.read_text(encoding="utf-8", errors="replace")
        if not (links := len(LINK.findall(text))):
            continue
        try:
            wrong = Checker(path, lambda text: None).first_wrong() or ""
        except (EngineError, OSError, ValueError, KeyError, TypeError) as error:
            wrong = f"cannot be checked: {error}"
        wrong = wrong.replace(str(folder), "").lstrip("/\\")
        found[path.relative_to(folder).as_posix()] = {"links": links, "wrong": wrong[:LONGEST]}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
