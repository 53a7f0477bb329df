"""Check the English of docstrings, comments and documentation: first words, chains of pronouns, long lines.

`python .ci/language.py [--list]` prints findings above a budget and then exits with 1; `--list` prints every finding.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: first words that no docstring, comment or paragraph may have
FIRST = re.compile(r"(Of|What|Where|Whether|Within|Those|That)\b")
#: words with a limit: at most `RATE` of them in a thousand words
CHAINS = re.compile(
    r"\b(that of|those of|of which|whose|so many|as many|lies?|stands?|stood|go on|goes on)\b", re.IGNORECASE
)
RATE = 1.5
#: maximum characters, without link addresses and code, in a line of prose in the documentation, and in a table's row
PROSE, ROW = 140, 200
ADDRESS = re.compile(r"\]\([^)]*\)|`[^`]*`|https?://\S+")
#: allowed findings of each kind in each area; never increase these budgets
LEFT = {
    "package": {"first": 0, "chain": 0},
    "tests": {"first": 0, "chain": 0},
    "docs": {"first": 0, "chain": 0, "line": 0},
}
CODE = {"package": ("lightning_dilated",), "tests": ("tests", "benchmarks", ".ci")}
PAGES = ("*.md", "docs/**/*.md", "recipes/*.md", "benchmarks/far/*.md")


class Text(NamedTuple):
    """A docstring, a comment or a paragraph."""

    path: Path
    line: int
    words: str
    begins: bool = True


class Finding(NamedTuple):
    """A text that breaks a rule."""

    kind: str
    text: Text
    message: str


def of_code(path: Path) -> Iterator[Text]:
    """Yield docstrings and comment lines of a file. The first of consecutive lines has `begins`."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc:
                yield Text(path, node.body[0].lineno, doc)
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        words = token.string.lstrip("#: ")
        if token.type == tokenize.COMMENT and not words.startswith(("type:", "noqa", "fmt:", "!")):
            yield Text(path, token.start[0], words, begins=token.start[0] != last + 1)
            last = token.start[0]


def of_page(path: Path) -> Iterator[Text]:
    """Yield lines of prose and rows of tables of a page, without code blocks."""
    begins, code = True, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        if code or line.startswith("```") or not line.strip():
            begins = True
            continue
        yield Text(path, number, line.lstrip("#->| "), not line.startswith("#") and (begins or line.startswith("- ")))
        begins = False


def of_recipe(path: Path) -> Iterator[Text]:
    """Yield comments of a recipe, without commands."""
    begins = True
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("# ")[2]
        if words and not words.startswith(" "):
            yield Text(path, number, words, begins or not line.startswith("#"))
        begins = not words or words.startswith(" ")


def areas() -> Iterator[tuple[str, list[Text]]]:
    """Yield (area, texts of the area)."""
    for name, folders in CODE.items():
        yield name, [x for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) for x in of_code(path)]
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    recipes = sorted(path for kind in ("yaml", "sbatch") for path in ROOT.glob(f"recipes/*.{kind}"))
    yield "docs", [x for path in pages for x in of_page(path)] + [x for path in recipes for x in of_recipe(path)]


def findings(area: str, texts: list[Text]) -> Iterator[Finding]:
    """Yield all texts of an area that break a rule."""
    for text in texts:
        bare = re.sub(r"`[^`]*`", "", text.words)
        if text.begins and FIRST.match(text.words):
            yield Finding("first", text, f"begins with {text.words.split()[0]!r}")
        for match in CHAINS.finditer(bare):
            yield Finding("chain", text, f"says {match[0]!r}")
        if area == "docs":
            shown, row = ADDRESS.sub("]", text.words), text.path.read_text().splitlines()[text.line - 1].startswith("|")
            if len(shown) > (ROW if row else PROSE):
                yield Finding("line", text, f"has {len(shown)} characters")


def main() -> int:
    wrong = False
    for area, texts in areas():
        listed = list(findings(area, texts))
        words = sum(len(x.words.split()) for x in texts)
        for kind, budget in LEFT[area].items():
            of_kind = [x for x in listed if x.kind == kind]
            allowed = max(budget, int(RATE * words / 1000)) if kind == "chain" else budget
            if "--list" in sys.argv or len(of_kind) > allowed:
                for x in of_kind:
                    print(f"{x.text.path.relative_to(ROOT)}:{x.text.line} {x.message}")
            print(f"{area}: {kind} {len(of_kind)} of {allowed} allowed, {words:,} words")
            wrong |= len(of_kind) > allowed
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
