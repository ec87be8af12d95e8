"""Do the documents say what is so? Every relative link and every path in backticks must exist, and every sample of
output must be what its command prints.

A sample is a code block under an HTML comment that names the command; a line "..." stands for any number of lines:

    <!-- output of: python3 starter/driver.py --fixture fixtures/tiny_model.json --clock virtual -->
    ```text
    first line
    ...
    last line
    ```
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.console import Console

SAMPLE = re.compile(r"<!-- output of: (.+?) -->\s*```text\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
PATH = re.compile(r"`((?:starter|tests|acceptance|scripts|fixtures|docs)/[\w./-]+)`")


def missing_paths(document: Path, text: str) -> list[str]:
    """Links and paths that lead nowhere."""
    links = [target for target in LINK.findall(text) if not (document.parent / target).exists()]
    paths = [target for target in PATH.findall(text) if not (ROOT / target).exists()]
    return [f"{document.name} names {target}, which does not exist" for target in links + paths]


def wrong_samples(document: Path, text: str, progress: Callable[[str], None]) -> list[str]:
    """Sample lines that the command does not print, or not in that order."""
    problems = []
    for command, sample in SAMPLE.findall(text):
        arguments = [sys.executable if word == "python3" else word for word in shlex.split(command)]
        progress(f"{document.name}: {command}")
        run = subprocess.run(arguments, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
        printed = iter(line.rstrip() for line in (run.stdout + run.stderr).splitlines())
        lines = [line.rstrip() for line in sample.splitlines() if line.strip() not in ("", "...")]
        missing = next((line for line in lines if line not in printed), None)
        if missing is not None:
            problems.append(f"{document.name}: `{command}` does not print: {missing}")
        elif run.returncode:
            problems.append(f"{document.name}: `{command}` ends with status {run.returncode}")
    return problems


def main() -> int:
    """Print every problem; exit code 1 if there is one."""
    documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    problems = []
    for document in documents:
        text = document.read_text(encoding="utf-8")
        with Console(sys.stderr).working(f"{document.name} ...") as progress:
            problems += missing_paths(document, text) + wrong_samples(document, text, progress)
    for problem in problems:
        print(problem)
    print(f"{len(documents)} documents, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
