"""Hooks of mkdocs that add files outside of docs/ to the site if a page links to them, and warn of dead links.

A Markdown file, a recipe or a source file of the checkout becomes a page with its text. Other files are
copied. `mkdocs build --strict` fails on a warning. Addresses on the site are those in the checkout, without `docs/`.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOG = logging.getLogger("mkdocs.hooks.site")
#: the suffixes of files whose text is shown on a page, and the names that highlight them
SHOWN = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".toml": "toml", ".txt": "text", ".json": "json"}
#: README.md would be the same page as docs/index.md
RENAMED = {"README.md": "readme.md"}
#: pages of the navigation that are outside of docs/
PAGES = ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md")
#: pages that represent their folder; a list of the other pages in the folder is appended
FOLDERS = ("benchmarks/results/README.md",)
#: a link or an image, or brackets in prose that the site would take for a link; brackets inside code are skipped
LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<target>[^)\s]+)\)|(?P<prose>\[[^\[\]`]{1,200}\]\[[^\[\]`]{1,200}\])",
    re.M | re.S,
)


def links(text: str) -> Iterator[str]:
    """Return the targets of all links and images on a page."""
    return (found["target"] for found in LINK.finditer(text) if found["target"])


def linked_path(root: Path, page: str, target: str) -> str | None:
    """Return the path from the root to the checkout file that a link leads to, or None for other links.

    Args:
        root: the root of the checkout.
        page: the path from the root to the file that contains the link.
        target: the target of the link. A folder means its README.md.
    """
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path)))
    if (root / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path if not path.startswith("../") and (root / path).is_file() else None


def _listed(root: Path, readme: str) -> list[str]:
    """Return the other pages of a folder with a README.md, sorted from the latest to the earliest."""
    folder = (root / readme).parent
    return sorted((p.relative_to(root).as_posix() for p in folder.glob("*.md") if p.name != "README.md"), reverse=True)


def site_path(path: str) -> str:
    """Return the path of a checkout file among the sources of the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return RENAMED.get(path, f"{path}.md" if Path(path).suffix in SHOWN else path)


def rewritten(root: Path, page: str, text: str) -> str:
    """Return a page with links to checkout files replaced by links of the site, and with escaped brackets."""
    folder = posixpath.dirname(site_path(page))

    def replace(match: re.Match[str]) -> str:
        if match["prose"]:
            return re.sub(r"([\[\]])", r"\\\1", match["prose"])
        target = match["target"]
        path = linked_path(root, page, target) if target else None
        if path is None:
            return match[0]
        _, hash_, anchor = target.partition("#")
        return f"]({posixpath.relpath(site_path(path), folder or '.')}{hash_}{anchor})"

    return LINK.sub(replace, text)


def linked_files(root: Path) -> list[str]:
    """Return all files outside of docs/ that pages in docs/ or `PAGES` link to, directly or through other files."""
    todo = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))] + list(PAGES)
    seen = set(todo)
    for page in todo:  # the loop appends to this list
        if not page.endswith(".md"):
            continue
        for target in links(page_text(root, page)):
            path = linked_path(root, page, target)
            if path is not None and path not in seen:
                seen.add(path)
                todo.append(path)
    return [path for path in todo if not path.startswith("docs/")]


def page_text(root: Path, path: str) -> str:
    """Return the Markdown of a page that shows a file outside of docs/."""
    text = (root / path).read_text()
    if path in FOLDERS:
        text += "\n## Files\n\n" + "".join(f"- [{Path(p).stem}]({Path(p).name})\n" for p in _listed(root, path))
    language = SHOWN.get(Path(path).suffix)
    return text if language is None else f"# {path}\n\n````{language}\n{text}````\n"


def _root(config: Any) -> Path:
    return Path(config.config_file_path).resolve().parent


_sources: dict[str, str] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/ to the site."""
    from mkdocs.structure.files import File

    root = _root(config)
    _sources.clear()
    for path in linked_files(root):
        source = site_path(path)
        _sources[source] = path
        content = {"content": page_text(root, path)} if source.endswith(".md") else {"abs_src_path": str(root / path)}
        files.append(File.generated(config, source, **content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links to checkout files as links of the site."""
    source = page.file.src_uri
    return rewritten(_root(config), _sources.get(source, f"docs/{source}"), markdown)


def on_post_build(config: Any) -> None:
    """Warn of dead links in the built site."""
    for page, target in dead_links(Path(config.site_dir)):
        LOG.warning("%s links to %s, which is not on the site", page, target)


class _Page(HTMLParser):
    """The anchors of a page, and the targets of its links, images and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchor and the target of one tag."""
        values = dict(attrs)
        self.anchors |= {value for value in (values.get("id"), values.get("name")) if value}
        self.targets |= {value for value in (values.get("href"), values.get("src")) if value}


def dead_links(site: Path) -> list[tuple[str, str]]:
    """Return (page, target) of each link to a file or an anchor that the built site does not have."""
    pages = {path.relative_to(site).as_posix(): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    # links of the page 404.html begin at the root of the server
    pages.pop("404.html", None)
    return [
        (name, target)
        for name, page in pages.items()
        for target in sorted(page.targets)
        if not _leads_somewhere(site, name, target, lambda path: pages[path].anchors)
    ]


def _leads_somewhere(site: Path, page: str, target: str, anchors: Callable[[str], set[str]]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path))) if parts.path else page
    if (site / path).is_dir():
        path = posixpath.normpath(posixpath.join(path, "index.html"))
    if not os.path.isfile(site / path):
        return False
    anchor = unquote(parts.fragment)
    # the theme's own scripts use "__" anchors
    return not anchor or not path.endswith(".html") or anchor.startswith("__") or anchor in anchors(path)
