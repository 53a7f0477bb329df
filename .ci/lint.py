"""Checks every file of the package without running it: who imports whom, circles, relative imports, numbers of files.

`python .ci/lint.py [FOLDER]` prints each finding as `file:line message` and exits with 1 if there is any.
FOLDER is the package's; left out, that of this checkout.
"""

import ast
import graphlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: a folder (or a file of the top folder) imports only from those before it; "" is the package itself
ORDER = (
    *(
        "_compat",
        "_device",
        "_validation",
        "pattern",
        "kernels",
        "sequence",
        "attention",
        "memory",
        "data",
        "checkpoint",
    ),
    *("models", "strategy", "planning", "callbacks", "", "cli", "__main__"),
)
#: most files in a folder, and in the package
FOLDER, PACKAGE = 15, 180


class Finding(NamedTuple):
    """What is wrong, and where."""

    path: Path
    line: int
    message: str


class Module(NamedTuple):
    """One file of the package, parsed."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[ast.Import | ast.ImportFrom]

    @property
    def folder(self) -> str:
        """The folder, or file of the top folder, that the module belongs to; "" is the package itself."""
        return folder_of(self.name)


def folder_of(name: str) -> str:
    """The second part of a dotted name."""
    return name.split(".")[1] if "." in name else ""


def read(root: Path) -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(), str(path))
        hints = {node for block in ast.walk(tree) if is_for_hints(block) for node in ast.walk(block)}
        imported = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and n not in hints]
        modules[name] = Module(name, path, tree, imported)
    return modules


def is_for_hints(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, what no run imports."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, int]]:
    """(name, line) of each of the package's modules that a file imports; `from a import b` may name a module b."""
    root = module.name.split(".")[0]
    for node in module.imports:
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {name if name in modules else node.module for name in full}
        yield from ((name, node.lineno) for name in sorted(names) if name.split(".")[0] == root)


def wrong_imports(module: Module, modules: dict[str, Module]) -> Iterator[Finding]:
    """Imports of a folder that does not lie below, and relative ones."""
    for node in module.imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Finding(module.path, node.lineno, "relative import; write the full name")
    if module.folder not in ORDER:
        yield Finding(module.path, 1, f"{module.folder} is not in ORDER of .ci/lint.py; say there where it stands")
        return
    above = ORDER[ORDER.index(module.folder) + 1 :]
    for name, line in imports(module, modules):
        if folder_of(name) in above:
            yield Finding(module.path, line, f"imports {name}, which stands above {module.folder} in ORDER")


def circles(modules: dict[str, Module]) -> Iterator[Finding]:
    """The first circle of imports, those inside of functions included, if there is one."""
    graph = {}
    for name, module in modules.items():
        below = {other for other, _ in imports(module, modules)} - {name}
        # `import a.b` runs a, whose own imports of b are its face
        graph[name] = {other for other in below if not name.startswith(f"{other}.")}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        yield Finding(modules[circle[0]].path, 1, f"circle of imports: {' <- '.join(circle)}")


def too_many_files(modules: dict[str, Module]) -> Iterator[Finding]:
    """Folders with more files than can be looked over."""
    folders = Counter(module.path.parent for module in modules.values())
    for folder, number in folders.items():
        if number > FOLDER:
            yield Finding(folder, 1, f"{number} files; a folder has at most {FOLDER}")
    if len(modules) > PACKAGE:
        yield Finding(next(iter(folders)), 1, f"{len(modules)} files in the package; at most {PACKAGE}")


def findings(root: Path) -> list[Finding]:
    """Everything that is wrong in a package, by file and line."""
    modules = read(root)
    found = [*circles(modules), *too_many_files(modules)]
    for module in modules.values():
        found += wrong_imports(module, modules)
    return sorted(found)


def main() -> int:
    """The exit status."""
    here = Path(__file__).resolve().parent.parent / "lightning_dilated"
    found = findings(Path(sys.argv[1]).resolve() if sys.argv[1:] else here)
    for path, line, message in found:
        print(f"{path}:{line} {message}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
