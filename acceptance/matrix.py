"""The suite against engines that are wrong on purpose (acceptance/wrong), and against others that are right.

    python3 -m acceptance wrong                        run all, print which tests fail for which mistake
    python3 -m acceptance wrong static_batching ...    these alone, with the first message of each
    python3 -m acceptance wrong --write                keep the table in docs/wrong.md
    python3 -m acceptance wrong --check                is docs/wrong.md what a run gives?
    python3 -m acceptance wrong --jobs 8               so many engines at a time

Exit code 0: every mistake fails the tests meant for it, with the message meant; every right engine passes; every test
fails for at least one mistake. All runs draw from one seed, so the table is always the same.
"""

from __future__ import annotations

import argparse
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SEED = "1"
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "wrong.md"
HEAD = """# Wrong on purpose

Made by `python3 -m acceptance wrong --write`, from seed {seed}; do not edit.

A test suite is worth what it catches. Each row below is the complete engine with one mistake (the code is in
`acceptance/wrong/`), and the acceptance tests that fail because of it; **bold** are those meant for it, whose message
was checked. Numbers are lines of the list of mistakes that the suite was written against; those without one were found
on the way, so that each test is meant for a mistake of its own.
"""
RIGHT = """
## Right, and different

These pass every test, so the suite asks for the contract and not for one way to it.

"""
TESTS = """
## Tests, and how many mistakes each one finds

"""


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python3 -m acceptance wrong", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mistakes, by the names of their functions")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--write", action="store_true", help="write docs/wrong.md")
    parser.add_argument("--check", action="store_true", help="compare with docs/wrong.md")
    options = parser.parse_args(arguments)
    os.environ["P07_SEED"] = SEED  # before harness is imported
    from acceptance.child import all_tests, run_apart
    from acceptance.wrong.mistake import DIFFERENT, MISTAKES, load_all
    load_all()
    variants = {name: variant for name, variant in {**MISTAKES, **DIFFERENT}.items()
                if not options.names or name in options.names}
    if unknown := set(options.names) - set(variants):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join({**MISTAKES, **DIFFERENT})}")
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {name: pool.submit(run_apart, all_tests(), name) for name in variants}
        for name, run in runs.items():
            results[name] = {test: outcome for test, outcome in run.result().items() if outcome.state == "failed"}
            print(f"{variants[name].line or '':3} {name}: {_listed(results[name], variants[name].meant)}", flush=True)
            if options.names and results[name]:
                test = next((test for test in variants[name].meant if test in results[name]), next(iter(results[name])))
                print(f"    {test}: {results[name][test].message}")
    problems = [problem for name, variant in variants.items() for problem in broken_promises(variant, results[name])]
    if not options.names:
        idle = [test for test in all_tests() if not any(test in failed for failed in results.values())]
        problems += [f"{test} fails for no mistake" for test in idle]
        document = _document(variants, results, all_tests())
        if options.write:
            DOCUMENT.write_text(document, encoding="utf-8", newline="\n")
        elif options.check and DOCUMENT.read_text(encoding="utf-8") != document:
            problems.append("docs/wrong.md is not what this run gives; --write it anew")
    print("\n".join(["", *problems, f"{len(variants)} implementations, {len(problems)} problems"]))
    return bool(problems)


def broken_promises(variant, failed):
    """What is not as a variant says, in words. ``failed``: {test: outcome}."""
    if not variant.says:
        return [f"{variant.name} is right, but fails {test}: {outcome.message}" for test, outcome in failed.items()]
    passed = [f"{variant.name} passes {test}" for test in variant.meant if test not in failed]
    broken = [f"{variant.name} does not fit the engine any more: {failed[test].message}" for test in variant.meant
              if test in failed and re.search("happened: (Attribute|Name)Error", failed[test].message)]
    return passed + broken + [f"{variant.name}: {test} does not say {variant.says!r}, but: {failed[test].message}"
                     for test in variant.meant if test in failed and not re.search(variant.says, failed[test].message)]


def _listed(failed, meant, most=10**6):
    """Failing tests, milestone by milestone; beyond ``most``, how many there are beside those meant."""
    names: dict[str, list[str]] = {}
    for test in failed:
        case, name = test.split(".")
        name = name.removeprefix("test_")
        names.setdefault(case[:2], []).append(f"**{name}**" if test in meant else name)
    if len(failed) > most:
        for milestone, mine in names.items():
            shown = [name for name in mine if name.startswith("*")]
            rest = len(mine) - len(shown)
            noun = "more" if shown else "test" if rest == 1 else "tests"
            names[milestone] = [*shown, f"{rest} {noun}"] if rest else shown
    return "; ".join(f"{milestone} {', '.join(mine)}" for milestone, mine in names.items()) or "passes"


def _document(variants, results, tests):
    from acceptance.wrong.mistake import DIFFERENT
    rows = [f"| {variant.line or ''} | `{name}` {variant.summary} | "
            f"{_listed(results[name], variant.meant, 12)} |"
            for name, variant in variants.items() if name not in DIFFERENT]
    table = "\n".join(["", "| | mistake | tests that fail |", "| ---: | --- | --- |", *rows, ""])
    right = "\n".join(f"- `{name}` {variant.summary}" for name, variant in DIFFERENT.items())
    found = {test: sum(test in failed for failed in results.values()) for test in tests}
    counts = "\n".join(["| test | mistakes |", "| --- | ---: |",
                        *(f"| `{test}` | {number} |" for test, number in found.items())])
    return HEAD.format(seed=SEED) + table + RIGHT + right + "\n" + TESTS + counts + "\n"
