"""The package as a whole: public names, docstrings, file sizes, the floors of the house, and imports without a GPU."""

import ast
import graphlib
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dilated as ld

ROOT = Path(ld.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    ".".join((ROOT.name, *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p for p in FILES
}
each = pytest.mark.parametrize("name", MODULES)

# -- the floors --------------------------------------------------------------------------------------------------------
#: what a folder (or a file of the top folder) may import besides itself; a new one has to say here where it stands
MAY = {
    "allocator": set(),
    "complaints": set(),
    "transfer": set(),
    "kernels": {"transfer"},
    "pattern": set(),
    "sequence": {"pattern", "kernels"},
    "attention": {"pattern", "transfer", "kernels", "sequence"},
    "data": {"pattern", "sequence"},
    "models": {"pattern", "transfer", "sequence", "attention"},
    "strategy": {"allocator", "pattern", "kernels", "sequence", "attention", "data"},
    "planning": {"allocator", "pattern", "kernels", "sequence", "attention", "data", "models", "strategy"},
    "callbacks": {"allocator", "pattern", "kernels", "sequence", "attention", "data", "models", "strategy", "planning"},
    "checkpoint": {"models", "strategy"},
    "generate": {"data", "models", "checkpoint"},
    "consolidate": {"models", "strategy", "checkpoint"},
    "encode": {"data"},
    "bench": {"pattern", "sequence", "attention", "planning", "generate", "verify"},
    "explain": {"pattern", "models"},
    "find_max": {"pattern", "models", "callbacks", "cli", "allocator"},
    "plan": {"pattern", "sequence", "models", "planning", "explain", "find_max"},
    "verify": {"pattern", "sequence", "attention", "models"},
    "cli": {
        *("allocator", "complaints", "pattern", "data", "models", "strategy", "planning", "callbacks"),
        *("checkpoint", "consolidate", "generate", "encode", "explain", "verify", "bench", "plan", ""),
    },
    "__main__": {"cli"},
    "": {"pattern", "sequence", "attention", "data", "models", "strategy", "planning", "callbacks"},
}


def imports(path, top_level_only=False):
    """The package's own modules that a file imports; `import a.b as c` and `from a import b` alike."""
    found, tree = set(), ast.parse(path.read_text())
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.Lambda))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if top_level_only and node in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f if f in MODULES else node.module for f in full}
    return {f for f in found if f.split(".")[0] == ROOT.name}


def floor(module):
    return module.split(".")[1] if "." in module else ""


@each
def test_imports_go_down_only(name):
    up = {f for f in imports(MODULES[name]) if floor(f) not in {floor(name), *MAY[floor(name)]}}
    assert not up, f"{name} may import from {sorted(MAY[floor(name)])} only"


def test_no_circles_between_modules():
    graph = {name: imports(path, top_level_only=True) - {name} for name, path in MODULES.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


# -- the files ---------------------------------------------------------------------------------------------------------
@each
def test_file_is_short_and_says_its_duty(name):
    text = MODULES[name].read_text()
    assert len(text.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(text))


@each
def test_public_things_have_docstrings(name):
    silent, todo = [], [ast.parse(MODULES[name].read_text())]
    while todo:
        for node in todo.pop().body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if [ast.unparse(x) for x in node.decorator_list] == ["overload"]:  # the function they are of has the text
                continue
            if not ast.get_docstring(node):
                silent.append(f"{node.name} (line {node.lineno})")
            if isinstance(node, ast.ClassDef):
                todo.append(node)
    assert not silent


# -- the public face ---------------------------------------------------------------------------------------------------
FACE = {
    "lightning_dilated": (
        *("Branch", "DilatedPattern", "dilated_attention", "DilatedAttention", "MultiheadDilatedAttention"),
        *("RingDilatedStrategy", "RingDilatedFSDPStrategy", "DilatedModule"),
        *("LongNetLM", "LongNetMLM", "LongNetClassifier", "SlideEncoder", "data", "callbacks"),
    ),
    "lightning_dilated.callbacks": (
        *("MemoryProfiler", "ActivationRecompute", "ShardedCheckpoint", "ThroughputMonitor", "CommunicationProfiler"),
        *("RunReport", "PredictionWriter"),
    ),
    "lightning_dilated.models": ("DilatedModule", "LongNetLM", "WarmupCosine"),
    "lightning_dilated.data": ("ByteDataModule",),
}


def exists(name):
    """Whether some module defines it, or a folder is called so."""
    return (ROOT / name).is_dir() or any(re.search(rf"^(class|def) {name}\b", p.read_text(), re.M) for p in FILES)


@pytest.mark.parametrize("module, name", [(m, n) for m, names in FACE.items() for n in names if exists(n)])
def test_public_name(module, name):
    found = importlib.import_module(module)
    assert name in found.__all__ and getattr(found, name) is not None


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_all_names_exist(module):
    found = importlib.import_module(module)
    assert [name for name in found.__all__ if not hasattr(found, name)] == []
    assert len(set(found.__all__)) == len(found.__all__)


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
    "MultiheadDilatedAttention": (ld.MultiheadDilatedAttention, "embed_dim num_heads pattern"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    """The order is fixed too: people pass these by position."""
    call, want = SIGNATURES[name]
    assert " ".join(inspect.signature(call).parameters).startswith(want)


def test_type_checkers_read_the_package():
    assert (ROOT / "py.typed").is_file()  # without it they take every name for Any


def test_version():
    text = (ROOT.parent / "pyproject.toml").read_text()
    assert f'version = "{ld.__version__}"' in text


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
import lightning_dilated as ld
q = torch.randn(1, 16, 4, 8, requires_grad=True)
ld.dilated_attention(q, q, q, ld.DilatedPattern.longnet([4, 8], [1, 2])).sum().backward()
assert q.grad.isfinite().all() and not {"triton", "huggingface_hub", "safetensors"} & set(sys.modules)
print("fine")
"""


def test_imports_and_runs_without_triton_and_cuda(tmp_path):
    result = run(sys.executable, "-c", BARE, cwd=tmp_path)
    assert result.stdout.strip() == "fine", result.stderr


@pytest.mark.slow
def test_python_m(tmp_path):
    result = run(sys.executable, "-m", "lightning_dilated", "validate", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("lightning-dilated: error: validate needs a model")


def test_console_script(tmp_path):
    script = shutil.which("lightning-dilated", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed, only importable")
    result = run(script, "--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"lightning-dilated {ld.__version__}\n")
