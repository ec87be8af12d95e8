"""Install the project as people do, and use it from another folder: what `pip install .` gives works, on each Python.

    python3 scripts/check_install.py                          on this Python
    python3 scripts/check_install.py python3.10 python3.13    on these; mypy, if this Python has it, reads the types

A source distribution and a wheel are made of a copy of the project (pip fetches setuptools for that), and the wheel is
installed into an empty environment of each Python. There the commands run that a newcomer tries first, and a program
that uses the API. From the unpacked source distribution, the scaffold's checks run, and what is left of it without a
wing is installed, as a copy and in editable form. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.base.console import EXIT_DIFFERS, EXIT_OK, Console, guarded, run_program
from starter.base.version import __version__

LEFT_OUT = (".git", "__pycache__", "build", "dist", "*.egg-info", ".mypy_cache", ".ruff_cache", ".import_linter_cache")
PROGRAM = '''"""The API, as a stranger would use it."""

from __future__ import annotations

import asyncio

from starter import (
    EngineSettings,
    InferenceEngine,
    Metrics,
    ModelConfig,
    Policy,
    Result,
    SamplingParams,
    TokenEvent,
    VirtualClock,
    load_scenario,
    play,
)


def main(path: str) -> None:
    scenario = load_scenario(path)
    config: ModelConfig = scenario.model
    settings: EngineSettings = scenario.engine
    with InferenceEngine.from_scenario(scenario, clock=VirtualClock()) as engine:
        result: Result = engine.generate("once", 5, temperature=0.5, seed=1)
        lists: list[list[int]] = engine.generate([[1, 2], [3]], 4)
        pieces: str = "".join(engine.stream_text(engine.submit("the", max_tokens=4, stop=["x"])))
        with engine.stream(engine.submit([1, 2, 3], 6, sampling=SamplingParams(logprobs=2))) as events:
            first: TokenEvent = next(events)
        found = asyncio.run(read(engine))
        metrics: Metrics = engine.metrics()
        assert len(result.tokens) == 5 and len(lists) == 2 and isinstance(pieces, str)
        assert first.top_logprobs and found == 3 and metrics.output_tokens and not engine.active
        assert config.vocab_size and settings.page_size
    with InferenceEngine.from_scenario(scenario, policy="shortest") as engine:
        policy: Policy = engine.scheduler.policy
        print(sum(len(played.events) for played in play(engine, scenario)), type(policy).__name__)


async def read(engine: InferenceEngine) -> int:
    return len([event async for event in engine.astream(engine.submit([1], 3, ignore_eos=True))])


if __name__ == "__main__":
    import sys
    main(sys.argv[1])
'''


class Failure(Exception):
    """What was wrong."""


def ask(*command: object, folder: Path, code: int = 0) -> str:
    """The output of a command, which must end with this code and print no traceback. Nothing of the checkout is on its
    path."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_REQUIRE"))}
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, check=False, text=True,
                          encoding="utf-8", env={**given, "PYTHONUTF8": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    if done.returncode != code or "Traceback" in done.stderr:
        shown = " ".join(map(str, command))
        raise Failure(f"{shown} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def expect(text: str, *words: str) -> None:
    """Failure unless all of these words are in the text."""
    if missing := [word for word in words if word not in text]:
        raise Failure(f"{missing[0]!r} is missing in:\n{text[:3000]}")


def build(work: Path) -> tuple[Path, Path]:
    """A wheel and an unpacked source distribution. The wheel is made from the source distribution, so that this must
    hold all that it needs."""
    source = work / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    environment(sys.executable, work / "tools")
    python = program(work / "tools", "python")
    ask(python, "-m", "pip", "install", "-q", "build", folder=work)
    ask(python, "-m", "build", "--sdist", "--outdir", work / "dist", source, folder=work)
    (archive,) = (work / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(work / "unpacked")  # made just now
    (unpacked,) = (work / "unpacked").iterdir()
    ask(python, "-m", "build", "--wheel", "--outdir", work / "dist", unpacked, folder=work)
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel, unpacked


def environment(python: str, folder: Path) -> None:
    """An empty virtual environment."""
    ask(python, "-m", "venv", folder, folder=folder.parent)


def program(folder: Path, name: str) -> Path:
    """A program of a virtual environment."""
    return folder / ("Scripts" if os.name == "nt" else "bin") / (f"{name}.exe" if os.name == "nt" else name)


def check_files(wheel: Path, unpacked: Path) -> None:
    """What the two hold, and do not hold."""
    names = zipfile.ZipFile(wheel).namelist()
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "starter").rglob("*")
            if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts}
    data = {f"starter/fixtures/{path.name}" for path in (ROOT / "fixtures").iterdir()}
    for file in sorted((code | data) - set(names)):
        raise Failure(f"the wheel lacks {file}; setup.py names the packages, pyproject.toml their data")
    other = [name for name in names if not name.startswith(("starter/", "p07_mini_inference_engine-"))]
    if other:
        raise Failure(f"the wheel holds {other[0]}")
    for name in ("tests/support.py", "acceptance/harness.py", "scripts/fuzz.py", "docs/handout.zh.md",
                 "fixtures/quatrains.json", "notebooks", ".ci/run", "DESIGN.md", "LICENSE", "noxfile.py"):
        if not (unpacked / name).exists():
            raise Failure(f"the source distribution lacks {name}; MANIFEST.in lists what it holds")


def check_python(python: str, wheel: Path, work: Path) -> None:
    """The wheel on one Python, from an empty folder."""
    place, here = work / "installed", work / "elsewhere"
    work.mkdir()
    here.mkdir()
    environment(python, place)
    installed, p07 = program(place, "python"), program(place, "p07")
    ask(installed, "-m", "pip", "install", "-q", "--no-index", wheel, folder=here)
    expect(ask(p07, folder=here), "usage: p07 COMMAND", "p07 demo")
    expect(ask(p07, "--version", folder=here), f"p07 {__version__}")
    expect(ask(p07, "demo", folder=here), "outputs equal the golden tokens")
    expect(ask(p07, "demo", "tiny_model", "--clock", "virtual", folder=here), "All 10 outputs equal the golden tokens.")
    for command in ("run", "serve", "check"):
        expect(ask(p07, command, "--help", folder=here), f"usage: p07 {command}")
    expect(ask(p07, "--fixture", "quatrains", "--prompt", "春", "--max-tokens", "3", folder=here), "output")
    expect(ask(installed, "-m", "starter", "--help", folder=here), "usage: python3 -m starter COMMAND")
    expect(ask(installed, "-m", "starter.driver", "--help", folder=here), "driver.py")
    ask(p07, "nonsense", folder=here, code=2)
    ask(p07, "demo", "nonsense", folder=here, code=2)
    (here / "program.py").write_text(PROGRAM, encoding="utf-8")
    fixture = ROOT / "fixtures" / "tiny_model.json"
    expect(ask(installed, "program.py", fixture, folder=here), "ShortestRemainingWithAging")
    if find_spec("mypy"):
        mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", installed)
        expect(ask(*mypy, "program.py", folder=here), "Success: no issues found")


def check_sources(unpacked: Path, work: Path) -> None:
    """What `pip install` and `pip install -e` give of a folder from which a wing was deleted."""
    for number, options in enumerate(((), ("-e",))):
        source, place = work / f"without-{number}", work / f"from-source-{number}"
        shutil.copytree(unpacked, source)
        shutil.rmtree(source / "starter" / "observe")
        environment(sys.executable, place)
        ask(program(place, "python"), "-m", "pip", "install", "-q", *options, source, folder=work)
        expect(ask(program(place, "p07"), "demo", "tiny_model", folder=work), "All 10 outputs equal the golden tokens.")
        ask(program(place, "p07"), "check", "run.jsonl", folder=work, code=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check each Python; print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="*", default=[sys.executable], help="interpreters (default: this one)")
    pythons = parser.parse_args(arguments).python
    return guarded(lambda: _check(pythons))


def _check(pythons: Sequence[str]) -> int:
    console = Console(sys.stdout)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            wheel, unpacked = build(work)
            check_files(wheel, unpacked)
            ask(sys.executable, "scripts/verify_scaffold.py", folder=unpacked)
            console.line(f"{wheel.name}: {wheel.stat().st_size:,} bytes; the source distribution is complete")
            check_sources(unpacked, work)
            console.line("without a wing: installed from its folder, and in editable form")
            for number, python in enumerate(pythons):
                check_python(python, wheel, work / str(number))
                console.line(f"{python}: installed, and used from another folder")
        except Failure as failure:
            console.line(str(failure), colour="red")
            return EXIT_DIFFERS
    return EXIT_OK


if __name__ == "__main__":
    run_program(main)
