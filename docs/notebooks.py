"""A hook of mkdocs that writes notebooks from the pages of tutorials, so that page and notebook have the same code.

Blocks of a tutorial are of five kinds:

- `bash`, `python`: the reader runs them in order, in one folder; Python blocks without a title run in one session;
- a block with a title, as in `python title="train.py"`: a file in this folder;
- `text`: a part of the output of the last block that runs; … stands for any text;
- `console`: runs once, in the checkout, before the other blocks.

`python docs/notebooks.py FOLDER` writes the notebooks without building the site.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: pages that are also offered as notebooks, relative to docs/
PAGES = ("tutorials/first_model.md", "tutorials/slides.md")
FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")


@dataclass
class Cell:
    """A part of a tutorial.

    Attributes:
        kind: "prose", "console", "file", "bash" or "python".
        text: Markdown, the file's content, or code.
        title: the name of the file.
        output: the lines that the code prints, in the order of printing.
    """

    kind: str
    text: str
    title: str = ""
    output: str = ""


def cells(page: str) -> list[Cell]:
    """Return the parts of a tutorial in the order of its page.

    Raises:
        ValueError: if a block has another language, or an output belongs to no code.
    """
    parts: list[Cell] = []
    end = 0
    for match in FENCE.finditer(page):
        if prose := page[end : match.start()].strip():
            parts.append(Cell("prose", prose))
        end = match.end()
        language, title, text = match["language"], match["title"] or "", match["text"]
        if title:
            parts.append(Cell("file", text, title))
        elif language == "text":
            code = [part for part in parts if part.kind in ("bash", "python")]
            if not code or code[-1].output:
                raise ValueError(f"this output follows no code, or code that has one already:\n{text}")
            code[-1].output = text
        elif language in ("bash", "python", "console"):
            parts.append(Cell(language, text))
        else:
            raise ValueError(f"a block of a tutorial is bash, python, text or console, or has a title; got {language}.")
    if prose := page[end:].strip():
        parts.append(Cell("prose", prose))
    return parts


def notebook(page: str) -> dict[str, Any]:
    """Return a tutorial in version 4.5 of Jupyter's notebook format."""
    listed = [_notebook_cell(number, cell) for number, cell in enumerate(cells(page))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": listed, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _notebook_cell(number: int, cell: Cell) -> dict[str, Any]:
    common: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
    if cell.kind in ("prose", "console"):
        text = LINK.sub(r"\1", cell.text) if cell.kind == "prose" else f"```console\n{cell.text}```"
        return {"cell_type": "markdown", "source": text.splitlines(keepends=True), **common}
    first = {"file": f"%%writefile {cell.title}\n", "bash": "%%bash\n", "python": ""}[cell.kind]
    output = {"output_type": "stream", "name": "stdout", "text": cell.output.splitlines(keepends=True)}
    source = (first + cell.text.rstrip("\n")).splitlines(keepends=True)
    outputs = [output] if cell.output else []
    return {"cell_type": "code", "source": source, "execution_count": None, "outputs": outputs, **common}


def notebook_path(page: str) -> str:
    """Return the path of the notebook of a page."""
    return str(Path(page).with_suffix(".ipynb"))


def _text(page: str) -> str:
    """Return the text of the notebook file for a page in docs/."""
    return json.dumps(notebook((Path(__file__).parent / page).read_text()), indent=1, ensure_ascii=False) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks to the site."""
    from mkdocs.structure.files import File

    for page in PAGES:
        files.append(File.generated(config, notebook_path(page), content=_text(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Insert a link to the notebook below the title of its page."""
    if page.file.src_uri not in PAGES:
        return markdown
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n[Download this page as a notebook]({Path(notebook_path(page.file.src_uri)).name})\n{rest}"


if __name__ == "__main__":
    for page in PAGES:
        target = Path(sys.argv[1]) / Path(notebook_path(page)).name
        target.write_text(_text(page))
        print(target)
