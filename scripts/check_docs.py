"""Do the documents say what is so?

    links      lead to a file that exists, and to a heading in it
    paths      in backticks exist, and so do tests (`test_dirty_pages`, `M2KVCache.test_work_*`)
    commands   that begin with python3 run something that exists, whose --help knows their options
    examples   that begin with >>> give what stands below them
    samples    are what their command prints; a line "..." stands for any number of lines:

                   <!-- output of: python3 starter/driver.py --fixture fixtures/tiny_model.json --clock virtual -->
                   ```text
                   first line
                   ...
                   last line
                   ```
    tables     under such a comment with "rows of" are what it prints: each row's numbers, for the command with the
               option that stands in the row
    languages  X.zh.md has the headings, commands, names and numbers of X.md, section by section; README.zh-CN.md has no
               command that README.md lacks
"""

from __future__ import annotations

import argparse
import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from starter.base.console import EXIT_BAD_INPUT, Console

SAMPLE = re.compile(r"<!-- output of: (.+?) -->\s*```text\n(.*?)```", re.DOTALL)
TABLE = re.compile(r"<!-- rows of: (.+?) -->\n\|.*\n\|[-: |]+\|\n((?:\|.*\n)+)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
PATH = re.compile(r"(?:starter|tests|acceptance|scripts|fixtures|docs)/[\w./-]+")
TEST = re.compile(r"(?:(\w+)\.)?(test_\w+?)(_?\*)?")
COMMAND = re.compile(r"^(?:\$ )?((?:\w+=\S+ )*python3 .*?)\s*(?:  .*|#.*)?$", re.MULTILINE)
EXAMPLE = re.compile(r"^(?:>>>|\.\.\.).*$", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
NUMBER = re.compile(r"(?<![A-Za-z_\d.])\d+(?:[.,]\d+)*")
MODULES = ("unittest", "py_compile", "doctest", "pip", "venv")  # Python's own


# ------------------------------------------------------------------------------------------------- what is named


def prose(text: str) -> str:
    """Without code blocks and comments."""
    return FENCE.sub("", COMMENT.sub("", text))


def anchors(text: str) -> set[str]:
    """What a link can name after #: headings in lower case, words joined by hyphens."""
    titles = [title.lower() for _, title in HEADING.findall(FENCE.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def missing_names(document: Path, text: str, root: Path) -> Iterator[str]:
    """Links, paths and tests that are not there."""
    for target in LINK.findall(CODE.sub("", prose(text))):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            yield f"links to {target}, which does not exist"
    tests = known_tests(root)
    for code in CODE.findall(prose(text)):
        if PATH.fullmatch(code) and not (root / code).exists():
            yield f"names {code}, which does not exist"
        if (found := TEST.fullmatch(code)) and not any(
                found[1] in (None, case) and (test.startswith(found[2]) if found[3] else test == found[2])
                for case, test in tests):
            yield f"names {code}, and there is no such test"


@cache
def known_tests(root: Path) -> frozenset[tuple[str, str]]:
    """(class, test) of the acceptance suite, by its sources."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.glob("acceptance/*.py"))]
    return frozenset((case.name, test.name) for tree in trees for case in tree.body if isinstance(case, ast.ClassDef)
                     for test in case.body if isinstance(test, ast.FunctionDef))


# ------------------------------------------------------------------------------------------------------ commands


def commands(text: str) -> list[str]:
    """Commands in code blocks without a language, and in backticks, as they stand there."""
    blocks = [block for language, block in FENCE.findall(text) if not language]
    return [command for part in (*blocks, *CODE.findall(prose(text))) for command in COMMAND.findall(part)]


def wrong_commands(text: str, root: Path) -> Iterator[str]:
    """Commands that run what is not there, or give it an option that it does not have."""
    for command in commands(text):
        words = shlex.split(command)
        words = words[words.index("python3") + 1:]
        program = words[:2] if words[0] == "-m" else words[:1]
        if program[-1] in MODULES or words[0] in ("-c", "..."):
            continue
        if not exists(program, root):
            yield f"names the command {command}, and there is no {' '.join(program)}"
            continue
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        if options:
            rest = words[len(program):]
            usage = help_of(tuple(program), root)
            if rest[0].isalpha():  # a subcommand, perhaps
                usage += help_of((*program, rest[0]), root)
            for option in options:
                if not re.search(rf"{option}\b", usage):
                    yield f"names the command {command}, which has no {option}"


def exists(program: list[str], root: Path) -> bool:
    """A script, a module, or a package with a command line."""
    path = root / program[-1].replace(".", "/") if program[0] == "-m" else root / program[-1]
    return path.is_file() or path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@cache
def help_of(program: tuple[str, ...], root: Path) -> str:
    """What it says of its options."""
    return subprocess.run([sys.executable, *program, "--help"], cwd=root, capture_output=True, encoding="utf-8",
                          check=False).stdout


# ------------------------------------------------------------------------------------------------------- outputs


@cache
def run(command: str) -> tuple[str, int]:
    """What a command prints, and its status."""
    arguments = [sys.executable if word == "python3" else word for word in shlex.split(command)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    return done.stdout + done.stderr, done.returncode


def wrong_samples(text: str, progress: Callable[[str], None]) -> Iterator[str]:
    """Sample lines that the command does not print, or not in that order."""
    for command, sample in SAMPLE.findall(text):
        progress(command)
        output, status = run(command)
        printed = iter(line.rstrip() for line in output.splitlines())
        lines = [line.rstrip() for line in sample.splitlines() if line.strip() not in ("", "...")]
        missing = next((line for line in lines if line not in printed), None)
        if missing is not None:
            yield f"`{command}` does not print: {missing}"
        elif status:
            yield f"`{command}` ends with status {status}"


def wrong_rows(text: str, progress: Callable[[str], None]) -> Iterator[str]:
    """Numbers of a table's row that are not in what its command prints."""
    for command, rows in TABLE.findall(text):
        for row in rows.splitlines():
            option = " ".join(CODE.findall(row))
            progress(f"{command} {option}")
            output, status = run(f"{command} {option}".strip())
            if status == EXIT_BAD_INPUT:  # a package that is missing here, say: its own words tell
                yield f"`{command} {option}`: {output.strip()[-200:]}"
                break
            printed = NUMBER.findall(output)
            for number in NUMBER.findall(CODE.sub("", row)):
                if number not in printed:
                    yield f"`{command} {option}` does not print {number}"


def wrong_examples(text: str) -> Iterator[str]:
    """Examples that give something else."""
    wrong: list[str] = []
    example = doctest.DocTestParser().get_doctest(text, {}, "example", None, 0)
    doctest.DocTestRunner(verbose=False).run(example, out=wrong.append)
    yield from (f"has an example that does something else: {report.split('Failed example:')[-1]}" for report in wrong)


# ----------------------------------------------------------------------------------------------------- languages


def sections(text: str) -> list[tuple[str, str]]:
    """(level of the heading, all below it up to the next)."""
    blank = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)  # headings are not looked for in code
    starts = [(found.start(), found[1]) for found in HEADING.finditer(blank)]
    return [(level, text[start:end]) for (start, level), (end, _) in zip(starts, [*starts[1:], (len(text), "")])]


def differences(english: str, other: str) -> Iterator[str]:
    """What one language says and the other does not."""
    ours, theirs = sections(english), sections(other)
    if [level for level, _ in ours] != [level for level, _ in theirs]:
        yield f"{len(ours)} headings in English, {len(theirs)} in the other language, or of other levels"
        return
    for (_, a), (_, b) in zip(ours, theirs):
        for what, here, there in zip(("commands", "examples", "names", "numbers"), facts(a), facts(b)):
            if here != there:
                yield (f"{a.splitlines()[0]}: {what} in English only: {[fact for fact in here if fact not in there]}; "
                       f"in the other language only: {[fact for fact in there if fact not in here]}")


def facts(section: str) -> tuple[list[str], ...]:
    """What no translation changes: commands and examples in their order; which names and which numbers there are."""
    return (commands(section), EXAMPLE.findall(section), sorted(set(CODE.findall(prose(section)))),
            sorted(set(NUMBER.findall(section))))


def wrong_language(document: Path, text: str) -> Iterator[str]:
    """A translation beside its original."""
    if document.name.endswith(".zh.md"):
        original = document.with_name(document.name.replace(".zh.md", ".md"))
        yield from differences(original.read_text(encoding="utf-8"), text)
    elif document.name == "README.zh-CN.md":
        known = commands(document.with_name("README.md").read_text(encoding="utf-8"))
        yield from (f"{command} is not in README.md" for command in commands(text) if command not in known)


def problems_of(document: Path, progress: Callable[[str], None]) -> list[str]:
    """All that is wrong with one document."""
    text = document.read_text(encoding="utf-8")
    found = [*missing_names(document, text, ROOT), *wrong_commands(text, ROOT), *wrong_examples(text),
             *wrong_language(document, text), *wrong_rows(text, progress), *wrong_samples(text, progress)]
    return [f"{document.name}: {problem}" for problem in found]


def _show(progress: Callable[[str], None], name: str, command: str) -> None:
    progress(f"{name}: {command}")


def main() -> int:
    """Print every problem; exit code 1 if there is one."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.chdir(ROOT)
    documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    problems = []
    for document in documents:
        with Console(sys.stderr).working(f"{document.name} ...") as progress:
            problems += problems_of(document, partial(_show, progress, document.name))
    print("\n".join([*problems, f"{len(documents)} documents, {len(problems)} problems"]))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
