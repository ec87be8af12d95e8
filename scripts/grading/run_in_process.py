"""Runs acceptance tests in the same process as the submission, as students do: python3 run_in_process.py.

The job comes as a line of JSON on standard input. For each test a line [token, id, state, message] is printed. The
token is drawn for this run; it is read before the submission is imported, and kept out of the environment and the
command line, so a process that ends early cannot report a result, whatever its exit status. A malicious submission
shares this process and could find the token, so a result from here can only cost points. Points come from
``judge.py``.

Here the tests draw their inputs from a digest that the submission can read. The judge draws from another digest, and
neither can be computed from the other. What remains: like any engine, a submission sees the inputs of each test that
it takes part in, and can put them into an error message. They do not reveal the inputs of another test or run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys


def main():
    job = json.loads(sys.stdin.readline())
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()  # after a crash standard error says where in Python it was
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
