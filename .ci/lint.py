"""Checks every file of the package without running it: who imports whom, circles, docstrings, relative imports.

`python .ci/lint.py [FOLDER]` prints each finding as `file:line message` and exits with 1 if there is any.
FOLDER is the package's; left out, that of this checkout.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: what a folder (or a file of the top folder) may import besides itself; a new one says here where it stands
MAY = {
    "_compat": set(),
    "_device": set(),
    "pattern": set(),
    "kernels": {"_device"},
    "sequence": {"pattern", "kernels"},
    "attention": {"_compat", "_device", "pattern", "kernels", "sequence"},
    "memory": {"_device", "pattern", "sequence", "attention"},
    "data": {"pattern", "sequence"},
    "checkpoint": set(),
    "models": {"_device", "pattern", "sequence", "attention", "memory", "checkpoint"},
    "strategy": {"_device", "pattern", "kernels", "sequence", "attention", "data", "checkpoint"},
    "planning": {"_device", "pattern", "kernels", "sequence", "attention", "memory", "data", "models", "strategy"},
    "callbacks": {
        *(
            "_device",
            "pattern",
            "kernels",
            "sequence",
            "attention",
            "memory",
            "data",
            "checkpoint",
            "models",
            "strategy",
        ),
        "planning",
    },
    "cli": {
        *(
            "_device",
            "pattern",
            "sequence",
            "attention",
            "memory",
            "data",
            "checkpoint",
            "models",
            "strategy",
            "planning",
        ),
        *("callbacks", ""),
    },
    "__main__": {"cli"},
    "": {"pattern", "sequence", "attention", "data", "models", "strategy", "planning", "callbacks"},
}


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
        imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules[name] = Module(name, path, tree, imported)
    return modules


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


def lines_that_run_later(tree: ast.Module) -> set[int]:
    """Lines of functions, and of `if TYPE_CHECKING`: what is imported there closes no circle."""
    later: set[int] = set()
    for node in ast.walk(tree):
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if checked or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            later |= set(range(node.lineno, node.end_lineno + 1))
    return later


def wrong_imports(module: Module, modules: dict[str, Module]) -> Iterator[Finding]:
    """Imports of a folder that does not lie below, and relative ones."""
    for node in module.imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Finding(module.path, node.lineno, "relative import; write the full name")
    if module.folder not in MAY:
        yield Finding(module.path, 1, f"{module.folder} is not in MAY of .ci/lint.py; say there what it may import")
        return
    allowed = {module.folder, *MAY[module.folder]}
    for name, line in imports(module, modules):
        if folder_of(name) not in allowed:
            yield Finding(module.path, line, f"imports {name}, but may import from {sorted(MAY[module.folder])} only")


def circles(modules: dict[str, Module]) -> Iterator[Finding]:
    """The first circle of imports at the top level of modules, if there is one."""
    graph = {}
    for name, module in modules.items():
        later = lines_that_run_later(module.tree)
        graph[name] = {other for other, line in imports(module, modules) if line not in later and other != name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        yield Finding(modules[circle[0]].path, 1, f"circle of imports: {' <- '.join(circle)}")


def missing_docstrings(module: Module) -> Iterator[Finding]:
    """Modules, public functions, classes and methods without a docstring."""
    if not ast.get_docstring(module.tree):
        yield Finding(module.path, 1, "no docstring that says what the file is for")
    bodies: list[ast.Module | ast.ClassDef] = [module.tree]
    while bodies:
        for node in bodies.pop().body:
            public = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if not public or node.name.startswith("_"):
                continue
            if [ast.unparse(decorator) for decorator in node.decorator_list] == ["overload"]:
                continue  # the function that it is of has the text
            if not ast.get_docstring(node):
                yield Finding(module.path, node.lineno, f"{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                bodies.append(node)


def findings(root: Path) -> list[Finding]:
    """Everything that is wrong in a package, by file and line."""
    modules = read(root)
    found = list(circles(modules))
    for module in modules.values():
        found += [*wrong_imports(module, modules), *missing_docstrings(module)]
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
