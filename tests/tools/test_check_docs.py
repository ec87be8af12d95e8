"""What scripts/check_docs.py finds in documents that are wrong on purpose; and the handout's quotations of messages."""

from __future__ import annotations

import re
import tempfile
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

from scripts import check_docs
from tests.paths import ROOT

FENCE = "```"


def quiet(text: str) -> None:
    """Progress that nobody sees."""


class NamesTest(unittest.TestCase):
    def wrong(self, text: str) -> list[str]:
        return list(check_docs.missing_names(ROOT / "docs" / "new.md", text, ROOT))

    def test_links(self) -> None:
        good = ["[a](../README.md)", "[a](../README.md#read-it)", "[a](wrong.md)", "[a](https://example.org/x)",
                "`[a](nowhere.md)`", f"{FENCE}\n[a](nowhere.md)\n{FENCE}", "<!-- [a](nowhere.md) -->"]
        for text in good:
            self.assertEqual(self.wrong(text), [], text)
        for target in ("nowhere.md", "../README.md#nowhere", "README.md"):
            self.assertEqual(self.wrong(f"[a]({target})"), [f"links to {target}, which does not exist"])

    def test_paths_and_tests(self) -> None:
        good = ("starter/kv_cache.py", "docs/wrong.md", "test_dirty_pages", "M2KVCache.test_dirty_pages",
                "M2KVCache.test_work_*", "kv.check()")
        for name in good:
            self.assertEqual(self.wrong(f"`{name}`"), [], name)
        for name in ("starter/kv_cash.py", "test_dirty_page", "M3ContinuousBatching.test_dirty_pages",
                     "M2KVCache.test_play_*"):
            self.assertEqual(len(self.wrong(f"`{name}`")), 1, name)


class CommandsTest(unittest.TestCase):
    def test_where_commands_stand(self) -> None:
        text = (f"{FENCE}\n$ python3 a.py --b c   # why\npython3 -m d.e > f.json\nX=1 python3 g.py\nls\n{FENCE}\n"
                f"Or `python3 h.py`.\n{FENCE}text\npython3 output.py\n{FENCE}\n")
        self.assertEqual(check_docs.commands(text),
                         ["python3 a.py --b c", "python3 -m d.e > f.json", "X=1 python3 g.py", "python3 h.py"])

    def test_programs_and_options(self) -> None:
        good = ("python3 starter/driver.py --fixture f.json --clock virtual", "python3 -m starter check run.jsonl",
                "python3 -m starter metrics run.jsonl --prometheus", "python3 -m acceptance M2 --seed 7",
                "python3 -m unittest discover -s tests -v", 'python3 -c "1 + 1"',
                "python3 -m starter.workloads --seed 7 > my.json")
        for command in good:
            self.assertEqual(list(check_docs.wrong_commands(f"`{command}`", ROOT)), [], command)
        for command, said in (("python3 starter/drive.py", "there is no starter/drive.py"),
                              ("python3 -m accept M2", "there is no -m accept"),
                              ("python3 starter/driver.py --fixtures f.json", "which has no --fixtures"),
                              ("python3 -m starter check run.jsonl --prometheus", "which has no --prometheus")):
            self.assertIn(said, "\n".join(check_docs.wrong_commands(f"`{command}`", ROOT)), command)


class OutputsTest(unittest.TestCase):
    def printing(self, output: str, status: int = 0) -> mock._patch[Callable[[str], tuple[str, int]]]:
        return mock.patch.object(check_docs, "run", lambda command: (f"{output} of {command}\nlast\n", status))

    def test_samples(self) -> None:
        text = f"<!-- output of: python3 a.py -->\n{FENCE}text\nfirst of python3 a.py\n...\nlast\n{FENCE}\n"
        with self.printing("first"):
            self.assertEqual(list(check_docs.wrong_samples(text, quiet)), [])
        with self.printing("other"):
            self.assertEqual(list(check_docs.wrong_samples(text, quiet)),
                             ["`python3 a.py` does not print: first of python3 a.py"])
        with self.printing("first", 1):
            self.assertEqual(list(check_docs.wrong_samples(text, quiet)), ["`python3 a.py` ends with status 1"])

    def test_rows(self) -> None:
        text = "<!-- rows of: python3 a.py -->\n| | option | steps |\n| --- | --- | ---: |\n| b | `--b 7` | 1,234 |\n"
        with self.printing("1,234 steps"):
            self.assertEqual(list(check_docs.wrong_rows(text, quiet)), [])
        with self.printing("1,235 steps"):
            self.assertEqual(list(check_docs.wrong_rows(text, quiet)), ["`python3 a.py --b 7` does not print 1,234"])

    def test_examples(self) -> None:
        self.assertEqual(list(check_docs.wrong_examples(">>> 1 + 1\n2\n\n")), [])
        self.assertIn("Expected:\n    3\nGot:\n    2", "".join(check_docs.wrong_examples(">>> 1 + 1\n3\n\n")))


class LanguagesTest(unittest.TestCase):
    ENGLISH = f"# A\n\n`x` is 3.\n\n{FENCE}\npython3 a.py   # now\n{FENCE}\n\n## B\n\n>>> f(1)\n\n"

    def differences(self, old: str, new: str) -> str:
        self.assertIn(old, self.ENGLISH)
        return "\n".join(check_docs.differences(self.ENGLISH, self.ENGLISH.replace(old, new)))

    def test_words_may_differ(self) -> None:
        self.assertEqual(self.differences("is", "等于") + self.differences("# now", "# 现在"), "")

    def test_what_may_not(self) -> None:
        for old, new, said in (("is 3", "is 4", "numbers in English only: ['3']; in the other language only: ['4']"),
                               ("`x`", "`y`", "names"), ("a.py", "b.py", "commands"), ("f(1)", "g(1)", "examples"),
                               ("## B", "B", "headings"), ("## B", "### B", "headings")):
            self.assertIn(said, self.differences(old, new), (old, new))

    def test_a_translation_is_compared_with_its_original(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("a.md", "# A 1\n"), ("a.zh.md", "# A 2\n"), ("README.md", "`python3 a.py`"),
                               ("README.zh-CN.md", "`python3 b.py`")):
                Path(folder, name).write_text(text, encoding="utf-8")
            found = {path.name: list(check_docs.wrong_language(path, path.read_text(encoding="utf-8")))
                     for path in Path(folder).iterdir()}
        self.assertEqual({name for name, problems in found.items() if problems}, {"a.zh.md", "README.zh-CN.md"})


class HandoutTest(unittest.TestCase):
    def quotations(self, text: str) -> Iterable[str]:
        """What the tables of failures say that one sees: phrases in backticks, in the first column."""
        tables = re.findall(r"^\| (?:what you see|看到什么) \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
        cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
        return [code for cell in cells for code in check_docs.CODE.findall(cell) if " " in code]

    def test_quoted_messages_are_those_of_the_tests(self) -> None:
        sources = "".join(path.read_text(encoding="utf-8") for folder in ("acceptance", "starter", "scripts")
                          for path in sorted((ROOT / folder).glob("*.py")))
        for name in ("handout.md", "handout.zh.md"):
            quoted = self.quotations((ROOT / "docs" / name).read_text(encoding="utf-8"))
            self.assertGreater(len(list(quoted)), 20)
            self.assertEqual([phrase for phrase in quoted if phrase not in sources], [], name)


class ReadingOrderTest(unittest.TestCase):
    ORDER = ("errors, schema, reference, backend, model, kv_cache, sampling, sequences, scheduler, streams, "
             "quantization, timeline, metrics, core, engine, numpy_backend, driver")

    def test_it_is_the_same_everywhere(self) -> None:
        for name in ("README.md", "README.zh-CN.md", "DESIGN.md", "docs/handout.md", "docs/handout.zh.md",
                     "starter/__init__.py"):
            words = " ".join((ROOT / name).read_text(encoding="utf-8").split())
            self.assertIn(self.ORDER, words, name)

    def test_it_has_all_files_of_the_spine(self) -> None:
        spine = {path.stem for path in (ROOT / "starter").glob("[a-z]*.py")}
        self.assertEqual(set(self.ORDER.split(", ")), spine)

    def test_the_table_is_in_this_order(self) -> None:
        for name in ("README.md", "README.zh-CN.md"):
            text = (ROOT / name).read_text(encoding="utf-8")
            rows = re.findall(r"^\| [M\d, ]*\| `starter/(\w+)\.py` \|", text, re.MULTILINE)
            self.assertEqual(", ".join(rows), self.ORDER, name)


class RubricTest(unittest.TestCase):
    def test_points_add_up(self) -> None:
        text = (ROOT / "rubric.md").read_text(encoding="utf-8")
        wanted = [int(number) for number in re.findall(r"^## .*\((\d+)\)$", text, re.MULTILINE)]
        given = [sum(int(points) for points in re.findall(r"^\| (\d+) \|", section, re.MULTILINE))
                 for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:6]]
        self.assertEqual(wanted, [40, 25, 15, 10, 10])
        self.assertEqual(given, wanted)

    def test_sections_that_are_marked_are_in_the_form(self) -> None:
        text = (ROOT / "rubric.md").read_text(encoding="utf-8")
        for document in ("DESIGN.md", "docs/DESIGN.template.md"):
            titles = re.findall(r"^## (.*)$", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)
            for title in ("Layout", "Lifecycles", "Choices", "Sources", "Measurements", "Failure cases",
                          "Accuracy, memory, speed"):
                self.assertIn(title, titles, document)
                self.assertIn(title, text)


if __name__ == "__main__":
    unittest.main()
