"""The marker's form: what a person has to judge, with what the program found beside each line.

    blank(lines, papers)     the form, points left open ("given": null)
    checked(data)            a form, as it was read from JSON. FormError if it is none
    merged(lines, form)      the lines with the points that the form gives. FormError if it cannot be, and OpenForm
                             while points are missing

``most`` is what a line can be worth: nothing is given for a report that is the blank template, nor for figures of which
one is forged (X4) or which no timeline backs. Who judges otherwise writes a reason into ``override``. ``lift`` names
gates (X2, X4, X5) that the marker found to be closed by mistake.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

GUIDE = {
    "files": "schema, lifecycles, backends and events in files of their own, one noun each",
    "choices": "design choices with the alternatives weighed; sources named, with what was taken and changed; X1",
    "figures": "figures that come from a named command and timeline; X4",
    "failure cases": "failure cases met, and what accuracy, memory and speed cost each other",
}
NEEDS = {"files": ("Layout", "Lifecycles"), "choices": ("Choices", "Sources"), "figures": ("Measurements",),
         "failure cases": ("Failure cases",)}


class FormError(Exception):
    """What is wrong with a filled-in form, in one sentence."""


class OpenForm(FormError):
    """It has not all of its points yet."""


def blank(lines, papers, notes) -> dict[str, Any]:
    """The form of one submission."""
    asked = []
    for line in lines:
        if line.marker:
            found, most = _found(line, papers)
            asked.append({"section": line.section, "name": line.name, "points": line.points, "most": most,
                          "what": GUIDE.get(line.name, ""), "found": found, "given": None, "override": "",
                          "comment": ""})
    return {"lines": asked, "closed": sorted({line.note for line in lines if line.note.startswith("X")}), "lift": [],
            "look_at": list(notes)}


def _found(line, papers) -> tuple[list[str], float]:
    design, most = papers["design"], line.points
    found = [design["problem"]] if design["problem"] else []
    for name in NEEDS.get(line.name, ()):
        if name in design["missing"]:
            found.append(f"DESIGN.md has no section {name}")
        elif name in design["empty"]:
            found.append(f"section {name} of DESIGN.md is all but empty")
    if design["problem"] or all(name in design["missing"] + design["empty"] for name in NEEDS.get(line.name, ("",))):
        most = 0
    if line.name == "figures":
        wrong = [f"{name}: {problem}" for name, timeline in papers["timelines"].items()
                 for problem in timeline["wrong"]]
        wrong += [figure["wrong"] for figure in papers["figures"].values() if figure["wrong"]]
        linked = sum(figure["links"] for figure in papers["figures"].values())
        found += [f"{len(papers['timelines'])} timelines, {linked} figures that name their file", *wrong]
        if wrong or not papers["timelines"]:
            most = 0
    return found, most


def checked(data) -> dict[str, Any]:
    """What was read from a form's file, if it is a form."""
    if not isinstance(data, dict) or not isinstance(data.get("lines"), list):
        raise FormError("this is no marker's form: it has no lines with section and name")
    lift = data.get("lift", [])
    if not isinstance(lift, list) or not all(isinstance(rule, str) for rule in lift):
        raise FormError(f'"lift" is {lift!r}, but must be a list of gates, as ["X2"]')
    return data


def merged(lines, form):
    """The lines, those of the marker filled in."""
    try:
        given = {(entry["section"], entry["name"]): entry for entry in form["lines"]}
    except (KeyError, TypeError):
        raise FormError("this is no marker's form: it has no lines with section and name") from None
    done = []
    for line in lines:
        entry = given.get((line.section, line.name))
        if not line.marker:
            done.append(line)
        elif entry is None or entry.get("given") is None:
            raise OpenForm(f"line {line.name!r} has no points yet: write a number into \"given\"")
        else:
            points, most = entry["given"], entry.get("most", line.points)
            for value in (points, most):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= line.points:
                    raise FormError(f"line {line.name!r}: {value!r} is not a number from 0 to {line.points}")
            if points > most and not entry.get("override"):
                raise FormError(f"line {line.name!r}: {points} points, but at most {most} can be given "
                                f"({'; '.join(map(str, entry.get('found') or []))}); a reason in \"override\" "
                                "allows it")
            done.append(replace(line, earned=float(points), note=str(entry.get("comment", ""))))
    return done
