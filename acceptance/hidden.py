"""Hidden tests: scenarios drawn from a secret seed. This code is public, the seed is not.

    python3 -m acceptance hidden --seed SECRET                   run all; SECRET is any text, best a long random one
    python3 -m acceptance hidden --seed -                        the seed is the first line of standard input
    python3 -m acceptance hidden HiddenLoads tight --seed S      some, by parts of their names
    python3 -m acceptance hidden --seed S --show                 print what is drawn, and run nothing
    python3 -m acceptance hidden --list                          what there is; with --json for a program
    python3 -m acceptance hidden --seed S --json                 {test: [state, message]} and nothing else
    python3 -m acceptance hidden --seed S --show-seed            for the teacher: messages say how to replay with S

The same seed draws the same tests, byte for byte; another seed others of the same kinds. Try them with seeds of your
own. The engine's process is told a digest of the seed, never the seed, and messages hold neither.

Exit code 0: everything asked for passed. 1: something failed. 2: no such test, or no seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from hashlib import sha256
from pathlib import Path

from hidden_cache import HiddenCache
from hidden_case import document
from hidden_loads import HiddenLoads
from hidden_memory import HiddenMemory
from hidden_quantization import HiddenQuantization
from hidden_requests import HiddenRequests
from hidden_service import HiddenService
from seeds import plain_seed

HIDDEN = (HiddenRequests, HiddenCache, HiddenLoads, HiddenMemory, HiddenQuantization, HiddenService)


def tests():
    """{id: test} of all hidden tests, by milestone."""
    return {f"{case.__name__}.{name}": test for case in HIDDEN for name, test in sorted(vars(case).items())
            if hasattr(test, "kind")}


def listed():
    """{id: what it is}, the same for every seed."""
    return {test_id: {"kind": test.kind, "requirement": test.requirement, "milestone": test.milestone}
            for test_id, test in tests().items()}


def digest(seed):
    """What is drawn from. Nobody finds the seed from it."""
    return sha256(f"hidden tests/{seed}".encode()).hexdigest()


def drawn_scenarios(seed, ids=None):
    """{id: document} as they are drawn; no engine takes part."""
    return {test_id: document(digest(seed), test_id, test.draw) for test_id, test in tests().items()
            if ids is None or test_id in ids}


def run_hidden(seed, ids=None, show_seed=False, environment=None, variant=""):
    """Run hidden tests, in a process of their own: {id: Outcome}. ``variant``: an engine of acceptance/wrong."""
    from acceptance.child import Outcome, run_apart
    outcomes = run_apart(list(tests()) if ids is None else ids, variant,
                         {**(environment or {}), "P07_SEED": digest(seed)})
    return {test_id: Outcome(outcome.state, told(outcome.message, test_id, seed, show_seed))
            for test_id, outcome in outcomes.items()}


def told(message, test_id, seed, show_seed=False):
    """A message of the harness, with the command that its reader can run; what was drawn from stands nowhere in it."""
    message, found, _ = message.partition("\n  replay: ")
    message = message.replace(digest(seed), "(hidden)")
    if not found:
        return message
    replay = f"{test_id} --seed {seed!r} --show-seed --timelines replay" if show_seed else (
        f"{test_id.rpartition('_')[0]} --seed ANY --timelines replay (draws others of its kind)")
    return f"{message}\n  replay:   python3 -m acceptance hidden {replay}"


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python3 -m acceptance hidden", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="(parts of) ids")
    parser.add_argument("--seed", metavar="SECRET", help="what to draw from; - reads it from standard input")
    parser.add_argument("--list", action="store_true", help="print the ids, and run nothing")
    parser.add_argument("--show", action="store_true", help="print what is drawn, a line of JSON a test")
    parser.add_argument("--show-seed", action="store_true", help="let messages hold the seed")
    parser.add_argument("--timelines", metavar="FOLDER", help="write the timeline of every engine to a file in here")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    chosen = {test_id: what for test_id, what in listed().items()
              if not options.tests or any(word in test_id for word in options.tests)}
    try:
        seed = plain_seed(options.seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not chosen or not (seed or options.list):
        print("--seed is missing: any text, or - to read it from standard input" if chosen else
              f"no hidden test has a name with {' or '.join(options.tests)}; --list shows them", file=sys.stderr)
        return 2
    if options.list:
        print(json.dumps(chosen) if options.json else "\n".join(
            f"{test_id:50} {what['requirement']:4} {what['milestone']}" for test_id, what in chosen.items()))
        return 0
    if options.show:
        for test_id, drawn in drawn_scenarios(seed, chosen).items():
            print(json.dumps([test_id, drawn]))
        return 0
    environment = {"P07_TIMELINES": str(Path(options.timelines).resolve())} if options.timelines else {}
    outcomes = run_hidden(seed, list(chosen), options.show_seed, environment)
    if options.json:
        print(json.dumps({test_id: [outcome.state, outcome.message] for test_id, outcome in outcomes.items()}))
    else:
        _print(outcomes)
    return int(any(outcome.state == "failed" for outcome in outcomes.values()))


def _print(outcomes):
    for test_id, outcome in outcomes.items():
        if outcome.state != "passed":
            print(f"\n{outcome.state.upper()} {test_id}\n{outcome.message}")
    states = [outcome.state for outcome in outcomes.values()]
    print(f"\n{states.count('passed')} of {len(states) - states.count('skipped')} passed")
