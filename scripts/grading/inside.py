"""Runs acceptance tests in one process with the submission, as students do: python3 inside.py, a job on standard input.

For each test it prints [token, id, state, message], a line of JSON. The token is drawn for this run, handed over before
the submission is imported and kept from the environment and the command line: a process that ends early, with
whatever status, has not said it. A submission that means harm shares this process and could find the token; so what is
said here can only cost points. What gives them is ``judge.py``.

What the tests draw from here, a digest that the submission can read, is not what they draw from there, and nobody
finds one from the other. What remains: a submission sees the inputs of each test that it is in, as any engine does, and
can put them into an error's text; from these it cannot draw what another test, or another run, asks for.
"""

from __future__ import annotations

import json
import os
import sys


def main():
    job = json.loads(sys.stdin.readline())
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.update(P07_SEED=job["seed"], P07_HANG_SECONDS=str(job["hang"]))
    if job["python"]:
        sys.executable = job["python"]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != here]
    sys.path[:0] = [job["tree"], os.path.join(job["tree"], "acceptance")]
    from acceptance.child import run_here
    for test_id, outcome in run_here(job["ids"]):
        output.write(json.dumps([job["token"], test_id, outcome.state, outcome.message]) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
