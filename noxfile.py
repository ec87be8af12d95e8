"""The lanes, each one command (``pip install nox``):

    nox                 the fast lane: lint, then the spine's tests and the acceptance tests, in under two minutes
    nox -s lint         ruff, mypy, the import contracts
    nox -s test         all unit tests with nothing installed, on every Python that is here; test-3.12: on that one
    nox -s full         the full lane: ``bash .ci/run``
"""

from __future__ import annotations

from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
LINT = (("ruff", "check", "."), ("mypy",), ("lint-imports",))

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["fast"]
nox.options.reuse_venv = "yes"


def spine_tests() -> list[str]:
    """Modules of the tests of the spine, of base and of command. Those of wings and scripts are in the full lane."""
    found = sorted(path for folder in (".", "base", "command") for path in ROOT.glob(f"tests/{folder}/test_*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found]


@nox.session(python=PYTHONS)
def test(session: nox.Session) -> None:
    """All unit tests, with nothing installed: about two minutes."""
    session.run("python", "-m", "unittest", "discover", "-s", "tests", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, import contracts."""
    session.install("-e", ".[dev,numpy]")
    for command in LINT:
        session.run(*command)


@nox.session
def fast(session: nox.Session) -> None:
    """Lint, C1, C3, the spine's unit tests, C4, C5 and a little fuzz: about 70 seconds on two shared cores."""
    lint(session)
    session.run("python", "scripts/verify_scaffold.py")
    session.run("python", "-m", "compileall", "-q", "starter")
    session.run("python", "-m", "unittest", *spine_tests())
    session.run("python", "starter/driver.py", "--fixture", "fixtures/tiny_model.json")
    session.run("python", "-m", "unittest", "discover", "-s", "acceptance", env={"RUN_STUDENT_ACCEPTANCE": "1"})
    session.run("python", "scripts/fuzz.py", "--seeds", "20", "--operations", "50")


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Everything, on every supported Python, from a clean checkout to a verdict."""
    session.run("bash", ".ci/run", external=True)
