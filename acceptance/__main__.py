"""How far is the engine? All milestones, one, or one test; each failure explains itself.

    python3 -m acceptance                          M1 15 of 15 done ... M4 3 of 15, and what fails first in each
    python3 -m acceptance --all                    every failure in full
    python3 -m acceptance M2                       one milestone
    python3 -m acceptance test_dirty_pages         tests whose names contain this
    python3 -m acceptance --seed 4711              the same models, weights and prompts again
    python3 -m acceptance --json                   one JSON document, {test: [state, message]}, and nothing else
    python3 -m acceptance --timelines FOLDER       keep what every engine did, event by event
    python3 -m acceptance hidden --help            further tests, drawn from a seed that only the teacher knows
{wrong}
Exit code 0: everything asked for passed. 1: something failed. 2: no test has such a name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  # before any line that such a Python could not run
    sys.exit(f"Python 3.10 or newer is needed; this is {'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")

HAS_WRONG = (Path(__file__).resolve().parent / "wrong").is_dir()
WRONG = "    python3 -m acceptance wrong --help             the suite against engines that are wrong on purpose\n"
NAMES = {"M1Reference": "schema and reference", "M2KVCache": "KV cache", "M3ContinuousBatching": "continuous batching",
         "M4PagedKV": "paged KV", "M5Quantization": "quantization", "M6EndToEnd": "end to end"}


def main(arguments=None):
    description = (__doc__ or "").replace("{wrong}\n", WRONG if HAS_WRONG else "")  # they are the teacher's
    parser = argparse.ArgumentParser(prog="python3 -m acceptance", description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="milestones or (parts of) names of tests")
    parser.add_argument("--seed", help="what to draw from; the default is another one in every run")
    parser.add_argument("--all", action="store_true", help="show every failure in full, not the first alone")
    parser.add_argument("--timelines", metavar="FOLDER", help="write the timeline of every engine to a file in here")
    parser.add_argument("--json", action="store_true", help="print outcomes for a program; what is given is left out")
    options = parser.parse_args(arguments)
    if options.seed:
        os.environ["P07_SEED"] = options.seed  # before harness is imported
    from acceptance.child import SEED, all_tests, is_given, run_apart
    ids = [test_id for test_id in all_tests()
           if not options.tests or any(word in test_id for word in options.tests)]
    if not ids:
        print(f"no test has a name with {' or '.join(options.tests)}; milestones: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    environment = {"P07_TIMELINES": str(Path(options.timelines).resolve())} if options.timelines else {}
    if options.json:
        outcomes = run_apart([test_id for test_id in ids if not is_given(test_id)], environment=environment)
        print(json.dumps({test_id: [outcome.state, outcome.message] for test_id, outcome in outcomes.items()}))
        return any(outcome.state == "failed" for outcome in outcomes.values())
    print(f"run seed {SEED}; --seed {SEED} draws the same again")
    failed: list[str] = []
    for milestone in NAMES:
        chosen = [test_id for test_id in ids if test_id.startswith(milestone)]
        if not _show(milestone, run_apart(chosen, environment=environment), is_given, options.all, bool(failed)):
            failed.append(milestone)
    if failed and not options.all:
        print("every failure in full: --all, or name a milestone or a test with it")
    print(f"still to do: {', '.join(name[:2] for name in failed)}" if failed else "all done")
    return bool(failed)


def _show(milestone, outcomes, is_given, everything, brief):
    """Print one milestone; False if a test failed. Without ``everything`` its first failure alone, which is in one line
    where ``brief``: an earlier milestone has one in full."""
    ids = list(outcomes)
    states = [outcome.state for test_id, outcome in outcomes.items() if not is_given(test_id)]
    passed, wanted = states.count("passed"), len(states) - states.count("skipped")
    failed = any(outcome.state == "failed" for outcome in outcomes.values())
    if ids:
        more = f", and {len(ids) - len(states)} of what is given" if len(ids) > len(states) else ""
        print(f"\n{milestone[:2]} {NAMES[milestone]:22}{passed:3} of {wanted}{more}{'' if failed else '  done'}",
              flush=True)
    shown = {test_id: outcome for test_id, outcome in outcomes.items() if outcome.state != "passed"}
    first = next((test_id for test_id, outcome in shown.items() if outcome.state == "failed"), None)
    if not everything and len(shown) > 1 and first:
        if not brief:
            print(f"\nFAILED {first}\n{shown[first].message}")
        else:
            lines = [line.strip() for line in shown[first].message.splitlines()]
            happened = next((line for line in lines if line.startswith("happened:")), lines[0])
            print(f"   first: {first}: {happened[:160]}")
        if count := sum(outcome.state == "failed" for outcome in shown.values()) - 1:
            print(f"   and {count} more")
        sys.stdout.flush()
        return not failed
    for test_id, outcome in shown.items():
        print(f"\n{outcome.state.upper()} {test_id}\n{outcome.message}", flush=True)
    return not failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["wrong"] and not HAS_WRONG:
        print("the engines that are wrong on purpose are the teacher's: they are not in this project", file=sys.stderr)
        sys.exit(2)
    if sys.argv[1:2] == ["wrong"]:
        from acceptance.matrix import main as main_of_matrix
        sys.exit(main_of_matrix(sys.argv[2:]))
    if sys.argv[1:2] == ["hidden"]:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from hidden import main as main_of_hidden
        sys.exit(main_of_hidden(sys.argv[2:]))
    sys.exit(main())
