"""The package as a whole: public names, signatures, CI's lint, and imports without a GPU."""

import importlib
import inspect
import os
import pkgutil
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dilated as ld
from lightning_dilated._extensions import NAMES, public_path

ROOT = Path(ld.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# -- the lint ----------------------------------------------------------------------------------------------------------
PRIVATE = """\
import argparse, os
import torch as t, torch._dynamo
from lightning.fabric import _private
from lightning_dilated.pattern.first import _own, Own
from torch.nn._inner import function
class A:
    __slots__ = ("_a",)
    def __init__(self, trainer, other):
        self._b = other.__class__
        super()._anything(), self._anything(), A._b, Own()._x
        trainer.loop._b()
        other._b, other[0]._actions
        os._exit(other._replace(_fields=1))
        getattr(other, "_anything", None)
        getattr(self, "_anything"), getattr(t, "public")
        t._C._f().x._g
"""
PLANTED = {
    "__init__.py": "from lightning_dilated import cli\n",
    "cli/__init__.py": "",
    "pattern/__init__.py": "",
    "pattern/up.py": "def f():\n    import lightning_dilated.models\n",
    "models/__init__.py": "",
    "pattern/first.py": "def late():\n    from lightning_dilated.pattern import second\n",
    "pattern/second.py": "import lightning_dilated.pattern.first\n",
    "pattern/hint.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_dilated import models\n"
    ),
    "pattern/near.py": "from . import first\n",
    "elsewhere/__init__.py": "",
    "_compat/__init__.py": "import torch\nf = torch._C._f\n",
    "strategy/__init__.py": "",
    "strategy/private.py": PRIVATE,
    **{f"kernels/{i}.py": "" for i in range(21)},
    "ext/__init__.py": 'MAY_IMPORT = {"b": ("a",)}\n',
    "ext/a/__init__.py": "from lightning_dilated.ext.c import x\nfrom lightning_dilated import models\n",
    "ext/c/__init__.py": "",
    "ext/b/__init__.py": "from lightning_dilated.ext.a import x\n",
    "models/down.py": "def f():\n    from lightning_dilated.ext.a import x\ng = 'lightning_dilated.ext.a:x'\n",
}
FOUND = """\
__init__.py:1 imports lightning_dilated.cli, which stands above
elsewhere/__init__.py:1 elsewhere is not in ORDER
ext/a/__init__.py:1 imports lightning_dilated.ext.c, which MAY_IMPORT
kernels:1 21 files; a folder has at most 20
models/down.py:2 imports lightning_dilated.ext.a; the core reaches ext/ by the table
models/down.py:3 names a module of ext/
pattern/first.py:1 circle of imports: lightning_dilated.pattern.first <- lightning_dilated.pattern.second
pattern/near.py:1 relative import
pattern/up.py:2 imports lightning_dilated.models, which stands above pattern
strategy/private.py:2 torch._dynamo is private; put it behind
strategy/private.py:3 lightning.fabric._private is private
strategy/private.py:5 torch.nn._inner.function is private
strategy/private.py:11 trainer.loop._b is private
strategy/private.py:12 other._actions is private
strategy/private.py:14 other._anything is private
strategy/private.py:16 t._C._f.x._g is private"""


def test_lint_finds_planted_faults(tmp_path):
    lint = ROOT.parent / ".ci" / "lint.py"
    if not lint.exists():
        pytest.skip("no checkout: a source archive has no .ci")
    for name, text in PLANTED.items():
        path = tmp_path / ROOT.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    argv = [sys.executable, "-I", "-S", str(lint), str(tmp_path / ROOT.name)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    findings = result.stdout.replace(f"{tmp_path / ROOT.name}/", "").splitlines()
    assert len(findings) == len(FOUND.splitlines()), result.stdout
    for line, want in zip(findings, FOUND.splitlines(), strict=True):
        assert line.startswith(want)


def test_the_layer_imports_few_files():
    """Imports inside functions count, names in `_extensions.py` do not."""
    path = ROOT.parent / ".ci" / "lint.py"
    if not path.exists():
        pytest.skip("no checkout: a source archive has no .ci")
    lint = runpy.run_path(str(path))
    modules, reached = lint["read"](ROOT), set()
    todo = ["lightning_dilated.attention.modules"]
    while todo:
        name = todo.pop()
        if name in modules and name not in reached:
            reached.add(name)
            todo += [other for other, _ in lint["imports"](modules[name], modules)]
    assert 40 < len(reached) <= 50 and not any(".ext." in name for name in reached)


def test_lint_holds_budgets():
    """A size above its budget is a finding, and so is a budget far above the size."""
    path = ROOT.parent / ".ci" / "lint.py"
    if not path.exists():
        pytest.skip("no checkout: a source archive has no .ci")
    lint = runpy.run_path(str(path))
    modules = lint["read"](ROOT)
    over_budget, sizes = lint["over_budget"], lint["reached"](modules)
    assert list(over_budget(modules, ROOT)) == []
    for name, difference in (("CORE", -1), ("PACKAGE", -1), ("INNER", -1), ("CORE", 1_000), ("INNER", 1)):
        budget = over_budget.__globals__[name]
        over_budget.__globals__[name] = sizes[name] + difference
        (fault,) = over_budget(modules, ROOT)
        over_budget.__globals__[name] = budget
        assert name in fault.message
        assert ("above its budget" if difference < 0 else "lower its budget") in fault.message


# -- the public face ---------------------------------------------------------------------------------------------------
#: {public name: module and name of its object}
PINNED = dict(line.split() for line in (Path(__file__).parent / "public_names.txt").read_text().splitlines())


def test_public_names_are_what_they_were():
    """Recipes, checkpoints and users' programs contain these names."""
    for name, where in PINNED.items():
        module, _, attribute = name.rpartition(".")
        face = importlib.import_module(module)
        assert getattr(face, attribute) is pkgutil.resolve_name(where), name
        assert attribute in face.__all__ and attribute in dir(face), name
    assert [name for name in NAMES if f"lightning_dilated.{name}" not in PINNED] == []


def test_a_public_class_is_written_by_its_public_name():
    moved = {where.replace(":", "."): name for name, where in PINNED.items() if ".ext." in where}
    assert len(moved) > 40
    for where in moved:
        public = public_path(where)
        assert ".ext." not in public and pkgutil.resolve_name(public) is pkgutil.resolve_name(where)


def test_all_names_exist():
    folders = [p.parent.relative_to(ROOT.parent) for p in FILES if p.name == "__init__.py"]
    assert len(folders) > 10
    for folder in folders:
        module = importlib.import_module(".".join(folder.parts))
        assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == [], folder
        assert len(set(getattr(module, "__all__", ()))) == len(getattr(module, "__all__", ())), folder


SIGNATURES = {
    "Branch": (ld.Branch, "segment_length dilation_rate shift heads offset"),
    "DilatedPattern": (ld.DilatedPattern, "branches offsets offset_heads padding"),
    "longnet": (ld.DilatedPattern.longnet, "segment_lengths dilation_rates kwargs"),
    "geometric": (ld.DilatedPattern.geometric, "first last ratio"),
    "head_groups": (ld.DilatedPattern.head_groups, "segment_lengths dilation_rates num_heads"),
    "dense": (ld.DilatedPattern.dense, "segment_length"),
    "counts": (ld.DilatedPattern.counts, "self seq_len num_heads causal num_kv_heads cu_seqlens"),
    "shifted": (ld.DilatedPattern.shifted, "self fraction below"),
    "explain": (ld.DilatedPattern.explain, "self seq_len num_heads depth causal num_kv_heads"),
    "dilated_attention": (
        ld.dilated_attention,
        "q k v pattern causal scale dropout lengths cu_seqlens return_lse engine",
    ),
    "recurrent_attention": (
        ld.recurrent_attention,
        "q k v log_decay beta kind segment causal state return_state lengths cu_seqlens sequence",
    ),
    "hashed_attention": (
        ld.attention.hashed_attention,
        "q k v z_q z_k null latest probes scale lengths cu_seqlens soft code_scores labelled sequence",
    ),
    "MultiheadDilatedAttention": (ld.MultiheadDilatedAttention, "embed_dim num_heads pattern"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    """The order of parameters must not change either, because users pass them by position."""
    call, want = SIGNATURES[name]
    assert " ".join(inspect.signature(call).parameters).startswith(want)


def test_type_checkers_read_the_package():
    assert (ROOT / "py.typed").is_file()  # without this file, type checkers treat every name as Any


# -- in a process of its own -------------------------------------------------------------------------------------------
def run(*argv, cwd):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


BARE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("no triton here")
sys.meta_path.insert(0, Blocker())
import torch
torch.cuda.is_available = lambda: False
import lightning.pytorch
lightnings = set(sys.modules)  # its torchmetrics imports transformers, where that is installed
import lightning_dilated as ld
loaded = [name for name in sys.modules if name.split(".")[0] == "lightning_dilated"]
assert len(loaded) <= 125 and not [name for name in loaded if ".ext" in name], len(loaded)
q = torch.randn(1, 16, 4, 8, requires_grad=True)
ld.dilated_attention(q, q, q, ld.DilatedPattern.longnet([4, 8], [1, 2])).sum().backward()
assert q.grad.isfinite().all() and "triton" not in sys.modules
assert not {"huggingface_hub", "safetensors", "transformers"} & (set(sys.modules) - lightnings)
print("fine")
"""


@pytest.mark.full
def test_imports_and_runs_without_triton_and_cuda(tmp_path):
    result = run(sys.executable, "-c", BARE, cwd=tmp_path)
    assert result.stdout.strip() == "fine", result.stderr


@pytest.mark.slow
def test_python_m(tmp_path):
    result = run(sys.executable, "-m", "lightning_dilated", "validate", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("lightning-dilated: error: validate needs a model")


@pytest.mark.full
def test_console_script(tmp_path):
    script = shutil.which("lightning-dilated", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed, only importable")
    result = run(script, "--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"lightning-dilated {ld.__version__}\n")
