"""Check every file of the package without running it: the order of folders, circular and relative imports, the number
of lines, and private names of other packages.

`python .ci/lint.py [FOLDER]` prints each finding as `file:line message` and exits with 1 if there is any. FOLDER is the
folder of the package; by default it is the one in this checkout.
"""

import ast
import graphlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: a folder of the core (or a file of the top folder) imports only from entries before it; "" is the package itself, and
#: `integrations` and `planning` export public names of extensions
ORDER = (
    *("_removed", "_extensions", "_compat", "_device", "_ops", "_validation", "pattern", "kernels", "sequence"),
    *(
        "recurrence",
        "attention",
        "memory",
        "data",
        "checkpoint",
        "models",
        "strategy",
        "callbacks",
        "integrations",
        "planning",
        "",
    ),
    *("cli", "__main__"),
)
EXT = "ext"
PACKAGE_FOLDER = Path(__file__).resolve().parent.parent / "lightning_dilated"
#: maximum lines of the core and of the package, and maximum imports of the package within the core's functions. Lower a
#: budget that is more than `SLACK` above the current number; increase one only with a feature that needs the lines
CORE, PACKAGE, INNER = 27_000, 68_400, 26
SLACK = 150
#: largest number of files in a folder
FOLDER = 20
#: names that begin with an underscore, but are documented as public
DOCUMENTED = ("_asdict", "_exit", "_fields", "_make", "_replace")


class Finding(NamedTuple):
    """A problem at a line of a file."""

    path: Path
    line: int
    message: str


class Module(NamedTuple):
    """A parsed file of the package."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[ast.Import | ast.ImportFrom]

    @property
    def folder(self) -> str:
        """The folder, or file of the top folder, to which the module belongs; "" is the package itself."""
        return folder_of(self.name)


def folder_of(name: str) -> str:
    """Return the folder (or file of the top folder) in a module's dotted name, which is the name's second part."""
    return name.split(".")[1] if "." in name else ""


def read(root: Path) -> dict[str, Module]:
    """Return {dotted name: module} for all modules of the package."""
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
    """Return whether a node is `if TYPE_CHECKING:`, which is not executed."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each module of the package that a file imports, also by `from a import b`."""
    root = module.name.split(".")[0]
    for node in module.imports:
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {name if name in modules else node.module for name in full}
        yield from ((name, node.lineno) for name in sorted(names) if name.split(".")[0] == root)


def wrong_imports(
    module: Module, modules: dict[str, Module], may_import: dict[str, tuple[str, ...]]
) -> Iterator[Finding]:
    """Yield imports that the order of folders does not allow, imports of `ext/` in the core, and relative imports."""
    for node in module.imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Finding(module.path, node.lineno, "relative import; write the full name")
    if module.folder == EXT:
        yield from _wrong_in_ext(module, modules, may_import)
        return
    if module.folder not in ORDER:
        yield Finding(module.path, 1, f"{module.folder} is not in ORDER of .ci/lint.py; say there where it stands")
        return
    above = ORDER[ORDER.index(module.folder) + 1 :]
    for name, line in imports(module, modules):
        if folder_of(name) == EXT:
            yield Finding(module.path, line, f"imports {name}; the core reaches ext/ by the table of _extensions.py")
        elif folder_of(name) in above:
            yield Finding(module.path, line, f"imports {name}, which stands above {module.folder} in ORDER")
    if module.folder != "_extensions":
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and f".{EXT}." in f"{node.value}.":
                yield Finding(module.path, node.lineno, "names a module of ext/; the table of _extensions.py does")


def _wrong_in_ext(
    module: Module, modules: dict[str, Module], may_import: dict[str, tuple[str, ...]]
) -> Iterator[Finding]:
    own = module.name.split(".")[2:3]
    for name, line in imports(module, modules):
        other = name.split(".")[2:3] if folder_of(name) == EXT else []
        if own and other and own != other and other[0] not in ("_compat", *may_import.get(own[0], ())):
            yield Finding(
                module.path, line, f"imports {name}, which MAY_IMPORT of ext/__init__.py does not allow {own[0]}"
            )


def allowed(modules: dict[str, Module]) -> dict[str, tuple[str, ...]]:
    """Return `MAY_IMPORT` of `ext/__init__.py`, or an empty dict if there is none."""
    for name, module in modules.items():
        if name.count(".") == 1 and folder_of(name) == EXT:
            for node in module.tree.body:
                if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "MAY_IMPORT":
                    return ast.literal_eval(node.value)
    return {}


def circles(modules: dict[str, Module]) -> Iterator[Finding]:
    """Yield the first circle of imports, including imports inside functions."""
    graph = {}
    for name, module in modules.items():
        below = {other for other, _ in imports(module, modules)} - {name}
        # `import a.b` also runs a, but a may import b to export its names
        graph[name] = {other for other in below if not name.startswith(f"{other}.")}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        yield Finding(modules[circle[0]].path, 1, f"circle of imports: {' <- '.join(circle)}")


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore, and is longer than that."""
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def own_names(modules: dict[str, Module]) -> set[str]:
    """Return names of functions and classes of the package, and names that it assigns in any scope or on `self`."""
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
    """Return nested attributes, calls and subscripts as `a.b.c`, without arguments, or "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def imported_from(module: Module) -> dict[str, str]:
    """Return {name in the file: package from which it is imported}, for imports anywhere in the file."""
    packages = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            packages |= {(a.asname or a.name).split(".")[0]: a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages |= {a.asname or a.name: node.module.split(".")[0] for a in node.names}
    return packages


def private_names(module: Module, own: set[str]) -> Iterator[Finding]:
    """Yield lines that import or use a private name of another package.

    An attribute of an imported name belongs to the imported package. The class of another object, such as an argument,
    is unknown. Its attribute is allowed if the package defines a private attribute of this name, unless the object is
    a trainer or reached from one, except for its strategy.
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
    """Return (object, name) of `object.name` or `getattr(object, "name")`; the name is None for other nodes."""
    if isinstance(node, ast.Attribute):
        return dotted(node.value), node.attr
    if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
        name = node.args[1]
        return dotted(node.args[0]), str(name.value) if isinstance(name, ast.Constant) else None
    return "", None


def too_many_files(modules: dict[str, Module]) -> Iterator[Finding]:
    """Yield folders with more than `FOLDER` files."""
    folders = Counter(module.path.parent for module in modules.values())
    for folder, number in folders.items():
        if number > FOLDER:
            yield Finding(folder, 1, f"{number} files; a folder has at most {FOLDER}")


def reached(modules: dict[str, Module]) -> dict[str, int]:
    """Return the current number for each budget."""
    core = [module for module in modules.values() if module.folder != EXT]
    lines = lambda files: sum(len(module.path.read_text().splitlines()) for module in files)  # noqa: E731
    return {"CORE": lines(core), "PACKAGE": lines(modules.values()), "INNER": sum(map(inner_imports, core))}


def inner_imports(module: Module) -> int:
    """Count the package's imports of itself inside functions."""
    root, functions = module.name.split(".")[0], (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        node for function in ast.walk(module.tree) if isinstance(function, functions) for node in ast.walk(function)
    }
    own = [
        node for node in module.imports if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{root}.")
    ]
    return sum(node in inside for node in own)


def over_budget(modules: dict[str, Module], root: Path) -> Iterator[Finding]:
    """Yield budgets that are exceeded, and budgets that must be reduced."""
    for name, there in reached(modules).items():
        budget, slack = globals()[name], 0 if name == "INNER" else SLACK
        if there > budget:
            yield Finding(root, 1, f"{name} is {there:,}, above its budget of {budget:,}: take something out")
        elif there < budget - slack:
            yield Finding(root, 1, f"{name} is {there:,}: lower its budget of {budget:,} in .ci/lint.py")


def findings(root: Path) -> list[Finding]:
    """Return all findings in a package, sorted by file and line."""
    modules = read(root)
    faults, own, may_import = [*circles(modules), *too_many_files(modules)], own_names(modules), allowed(modules)
    if root == PACKAGE_FOLDER:
        faults += over_budget(modules, root)
    for module in modules.values():
        faults += wrong_imports(module, modules, may_import)
        if "_compat" not in module.name.split("."):
            faults += private_names(module, own)
    return sorted(faults)


def main() -> int:
    faults = findings(Path(sys.argv[1]).resolve() if sys.argv[1:] else PACKAGE_FOLDER)
    for path, line, message in faults:
        print(f"{path}:{line} {message}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
