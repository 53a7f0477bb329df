"""The reference consists of docstrings: public ones describe each argument, error and tensor shape."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .test_site import public_names

#: a line of an Args section that begins an entry: "name: ..." or "name, other: ..." after the section's indent
ENTRY = re.compile(r"^ {4}(?=\S)", re.M)
#: a shape, where to find it, or that no tensor is expected
SHAPE = re.compile(r"\((\.\.\.|[A-Z]|batch)|\bscalar|\bas (in|of) `|\bany shape|\bsame tensor|\band None\.")


class Documented(NamedTuple):
    """A callable with an entry on a page of the reference, or a public method of a class with an entry.

    Attributes:
        name: dotted.
        signature: without self.
        code: functions with the `raise` statements that count.
        text: its docstrings; a constructor's include the class, `__init__` and bases in this package.
        method: whether it is a method of a public class.
    """

    name: str
    signature: inspect.Signature
    code: list[Callable[..., Any]]
    text: str
    method: bool = False


def doc(x: object) -> str:
    return (inspect.getdoc(x) or "") + "\n"


def ours(x: Any) -> bool:
    return getattr(x, "__module__", "").startswith(("lightning_dilated", __name__))


def constructor(name: str, kind: type) -> Documented:
    """Return the entry of a class."""
    bases = [base for base in kind.__mro__ if ours(base)]
    code = [vars(kind)[x] for x in ("__init__", "__post_init__") if x in vars(kind)]
    code = [x for x in code if x.__code__.co_filename == inspect.getsourcefile(kind)]  # not a dataclass's own
    text = "".join(doc(x) for x in bases) + "".join(doc(x) for x in code if x.__name__ == "__init__")
    return Documented(name, inspect.signature(kind), code, text)


def methods(name: str, kind: type) -> Iterator[Documented]:
    """Yield public methods that a class defines itself, without hooks of Lightning and torch."""
    foreign = {word for base in kind.__mro__ if not ours(base) for word in vars(base)} - {"forward"}
    for word, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if word.startswith("_") or word in foreign or not inspect.isfunction(function) or not ours(function):
            continue
        inherited = "".join(doc(vars(base)[word]) for base in kind.__mro__[1:] if ours(base) and word in vars(base))
        yield Documented(
            f"{name}.{word}", inspect.signature(function), [function], doc(function) + inherited, method=True
        )


def documented(public: dict[str, object]) -> list[Documented]:
    """Return functions, constructors and methods, each once."""
    listed: list[Documented] = []
    for name, value in {id(x): (name, x) for name, x in reversed(public.items())}.values():
        if inspect.isclass(value):
            listed += [constructor(name, value), *methods(name, value)]
        elif inspect.isfunction(value):
            listed.append(Documented(name, inspect.signature(value), [value], doc(value)))
    return listed


def entries(text: str) -> dict[str, str]:
    """Return {argument: its description} of all sections Args and Attributes."""
    described: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n)+)", text, re.M):
        for entry in ENTRY.split(section)[1:]:
            head, colon, body = entry.partition(":")
            words = re.sub(r"\([^)]*\)", "", head)
            described |= {word.strip(" *`\n"): body for word in words.split(",") if colon}
    return described


def parameters(x: Documented) -> list[inspect.Parameter]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for p in x.signature.parameters.values() if p.kind not in variable and p.name not in ("self", "cls")]


def missing_arguments(x: Documented) -> list[str]:
    """Return arguments without an entry, and not in backticks in the text."""
    if re.search(r"^Args: (those|as) ", x.text, re.M):
        return []
    known = set(entries(x.text)) | {
        word for code in re.findall(r"`([^`]+)`", x.text) for word in re.split(r"\W+", code)
    }
    return [f"{x.name}({p.name})" for p in parameters(x) if p.name not in known]


def missing_errors(x: Documented) -> list[str]:
    """Return exceptions that its own code raises and its text does not name."""
    raised = set()
    for function in x.code:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if isinstance(definition.body[-1], ast.Raise) and len(definition.body) <= 2:  # type: ignore[attr-defined]
            continue  # a subclass has to define it
        for node in ast.walk(definition):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised.add(ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc))
    names = {name for name in raised if re.fullmatch(r"[A-Z]\w+", name)} - {"AssertionError"}
    return [f"{x.name} raises {name}" for name in sorted(names) if name not in x.text]


def missing_shapes(x: Documented) -> list[str]:
    """Return tensor arguments with no shape in their description or the text."""
    words = {p.name: str(p.annotation) for p in parameters(x)}
    tensors = [
        name
        for name, kind in words.items()
        if "Tensor" in kind and not re.search(r"(Sequence|Iterable|Mapping)\[", kind)
    ]
    described = entries(x.text)
    return [f"{x.name}({name})" for name in tensors if not SHAPE.search(described.get(name) or x.text)]


def test_arguments_of_public_names_are_described() -> None:
    listed = [x for x in documented(public_names()) if not x.method]
    assert len(listed) > 80
    assert not [missing for x in listed for missing in missing_arguments(x)]


def test_errors_of_public_names_and_methods_are_described() -> None:
    listed = documented(public_names())
    assert len(listed) > 300
    assert not [missing for x in listed for missing in missing_errors(x)]


def test_tensors_of_public_names_and_methods_have_shapes() -> None:
    listed = documented(public_names())
    assert sum("Tensor" in str(x.signature) for x in listed) > 30
    assert not [missing for x in listed for missing in missing_shapes(x)]


def test_methods_of_public_names_have_docstrings() -> None:
    assert not [x.name for x in documented(public_names()) if not x.text.strip()]


class Poor:
    """Says little of `size`."""

    def __init__(self, size: int, rate: int) -> None:
        if size < rate:
            raise KeyError(size)

    def call(self, x: torch.Tensor) -> None:
        """Use x."""


class Rich(Poor):
    """Says all.

    Args:
        size, other: numbers;
            and more.
        rate: another.

    Raises:
        KeyError: for small sizes.
    """

    def call(self, x: torch.Tensor) -> None:
        """Args:
        x: (B, N) numbers.
        """


def test_what_a_docstring_lacks_is_named() -> None:
    poor, call = documented({"a.Poor": Poor})
    assert missing_arguments(poor) == ["a.Poor(rate)"]
    assert missing_errors(poor) == ["a.Poor raises KeyError"]
    assert missing_shapes(call) == ["a.Poor.call(x)"]
    rich, call = documented({"a.Rich": Rich})
    assert not missing_arguments(rich) + missing_errors(rich) + missing_shapes(call)
