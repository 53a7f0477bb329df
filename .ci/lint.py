"""Checks every file of the package without running it: who imports whom, circles, relative imports, numbers of files, and
private names of other packages.

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
        "recurrence",
        "attention",
        "memory",
        "data",
        "checkpoint",
    ),
    *("models", "integrations", "strategy", "planning", "callbacks", "", "cli", "__main__"),
)
#: most files in a folder (that of the commands has one for each), and in the package
FOLDER, PACKAGE = 20, 285
#: names that begin with an underscore, and are documented as public
DOCUMENTED = ("_asdict", "_exit", "_fields", "_make", "_replace")


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


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore, and is more than that."""
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def own_names(modules: dict[str, Module]) -> set[str]:
    """Private names that the package defines: functions, classes, and what is assigned in a module, a class or on `self`."""
    names: set[str] = set()
    for node in (node for module in modules.values() for node in ast.walk(module.tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            names.add(node.attr)
    return names


def dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes, calls and subscripts, without arguments; "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def imported_from(module: Module) -> dict[str, str]:
    """{name in the file: the package that it was imported from}, wherever in the file."""
    packages = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            packages |= {(a.asname or a.name).split(".")[0]: a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages |= {a.asname or a.name: node.module.split(".")[0] for a in node.names}
    return packages


def private_names(module: Module, own: set[str]) -> Iterator[Finding]:
    """Lines that import or use a private name of another package.

    An attribute of what was imported is its package's. One of another object, such as an argument, is its class's, which is
    known by the name only: the package's own where the package defines it, unless the object is reached from a trainer and
    is no strategy.
    """
    root, packages, lines = module.name.split(".")[0], imported_from(module), {}
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{source}{alias.name}" for alias in node.names):
                if name.split(".")[0] != root and any(map(is_private, name.split("."))):
                    lines.setdefault(node.lineno, name)
            continue
        owner, name = attribute(node)
        first = owner.split(".")[0]
        if name is None or not is_private(name) or owner in ("self", "cls", "super"):
            continue
        parts = owner.split(".")
        unknown = name not in own or ("trainer" in parts and "strategy" not in parts)
        if packages[first] != root if first in packages else unknown:
            lines.setdefault(node.lineno, f"{owner}.{name}")
    for line, name in lines.items():
        yield Finding(module.path, line, f"{name} is private; put it behind a function of _compat")


def attribute(node: ast.AST) -> tuple[str, str | None]:
    """(the object, the name) of `object.name` and `getattr(object, "name")`; the name is None for other nodes."""
    if isinstance(node, ast.Attribute):
        return dotted(node.value), node.attr
    if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
        name = node.args[1]
        return dotted(node.args[0]), str(name.value) if isinstance(name, ast.Constant) else None
    return "", None


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
    found, own = [*circles(modules), *too_many_files(modules)], own_names(modules)
    for module in modules.values():
        found += wrong_imports(module, modules)
        if module.folder != "_compat":
            found += private_names(module, own)
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
