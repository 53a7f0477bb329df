"""Write a model as an ONNX file or AOTInductor package that runs without this package, and check the file.

torch.export traces the model on one rank, and the attention op is decomposed into plain torch operations. A temporary
file is written and run at several lengths. If its outputs agree with the model's, it is moved to its path.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import set_compiled_call
from lightning_dilated._validation import integer
from lightning_dilated.attention.rotary import rotate
from lightning_dilated.attention.spec import decode
from lightning_dilated.ext._compat.torch import compile_package, compiled_call, namespace_of
from lightning_dilated.ext.export.decomposed import decomposed
from lightning_dilated.ext.slides.backbone import cells_of
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.recurrence.description import plain_recurrences
from lightning_dilated.sequence import active_sequence

#: file formats by suffix
FORMATS = {".onnx": "ONNX", ".pt2": "AOTInductor package"}
#: maximum number of tokens in sequences on which a file is compared with the model
CHECKED = 4096
#: largest accepted difference, relative to the largest value of an output, for each dtype
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
#: options of Inductor: the first limits the fusion of index arithmetic, which would take minutes of compilation for a
#: layer; the second turns off a pass that does not support `var_mean`
INDUCTOR = {"realize_opcount_threshold": 3, "constant_and_index_propagation": False}


@dataclass(frozen=True)
class Exported:
    """The result of `export`.

    Attributes:
        path: the file.
        inputs, outputs: name -> (dtype, shape), in the file's order; "length" in a shape is the variable length.
        max_len: the largest length; the smallest length is 2.
        checked: the lengths at which the file was compared with the model.
        error: the largest difference at these lengths, relative to the largest value of the output.
    """

    path: Path
    inputs: dict[str, tuple[str, tuple[int | str, ...]]]
    outputs: dict[str, tuple[str, tuple[int | str, ...]]]
    max_len: int
    checked: tuple[int, ...]
    error: float


def export(model: DilatedModule, path: str | Path, max_len: int, batch_size: int = 1) -> Exported:
    """Write a model as a file that runs without this package, for inference on one device.

    Args:
        model: a LongNetLM, LongNetMLM, LongNetClassifier, SlideEncoder or your own model with `export_inputs`, in eval
            mode.
        path: NAME.onnx for onnxruntime (needs the extra `export`), or NAME.pt2 for torch's `aoti_load_package` on the
            model's device (needs a C++ compiler).
        max_len: maximum number of tokens (or tiles) in a sequence. The file takes 2 to `max_len` and raises for more.
        batch_size: number of sequences of equal length in a call.

    Raises:
        ValueError, TypeError: before any work, if the model cannot be exported; later, if the file's outputs are wrong.
        ModuleNotFoundError: if libraries of the format are missing.
    """
    path = Path(path)
    refuse(model, path, max_len)
    integer(batch_size, "batch_size", 1)
    model.configure_model()
    length = min(max_len, CHECKED)
    with torch.no_grad(), _uncompiled(model), tempfile.TemporaryDirectory(dir=_folder(path)) as folder:
        example = model.export_inputs(length, batch_size)
        outputs = model.export_outputs(**example)  # this also fills tables that become constants of the graph
        graph = exported_program(model, max_len, batch_size, norms=path.suffix == ".pt2")
        written = Path(folder) / path.name
        run = (_write_onnx if path.suffix == ".onnx" else _write_package)(graph, written, list(example), list(outputs))
        lengths = tuple(sorted({2, max(2, length * 2 // 3), length}))
        error = max(_compare(model, run, n, batch_size, path) for n in lengths)
        for file in Path(folder).iterdir():  # weights of large models are in files next to the .onnx
            shutil.move(file, path.parent / file.name)
    named = [_described(x, length) for x in (example, outputs)]
    return Exported(path, *named, max_len, lengths, error)


def refuse(model: Any, path: Path, max_len: int) -> None:
    """Raise if the model, path or length is not supported."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} must end in .onnx (for onnxruntime) or .pt2 (an AOTInductor package).")
    if not isinstance(model, DilatedModule):
        raise TypeError(f"export takes a DilatedModule, got {type(model).__name__}.")
    name, group = type(model).__name__, active_sequence()
    if group is not None and group.ranks > 1:
        raise ValueError("a sequence that ranks share cannot be exported: export outside of the SequenceGroup.")
    if model.training:
        raise ValueError("export needs a model in eval mode, because dropout changes its outputs: call .eval() first.")
    if type(model).export_inputs is DilatedModule.export_inputs:
        raise TypeError(
            f"a {name} cannot be exported: it has no export_inputs(length, batch_size), which returns the tensors that "
            "the exported model takes. LongNetLM, LongNetMLM, LongNetClassifier and SlideEncoder have this method."
        )
    integer(max_len, "max_len", 2)
    if getattr(model, "lora_rank", None) is not None:
        raise ValueError("low-rank updates cannot be exported separately: call model.merge_lora() first.")
    if getattr(model, "linear_dtype", None) is not None:
        raise ValueError(f"linear_dtype={model.linear_dtype} cannot be exported: load the checkpoint without it.")
    if any(getattr(model, "recurrences", ())):
        raise ValueError(
            f"recurrence={plain_recurrences(model.recurrences)!r} cannot be exported: its chunks depend on the length. "
            "Export a model without it."
        )
    if any(getattr(model, "hashed", ())):
        raise ValueError("hashed heads cannot be exported, because they sort rows: export a model without hashed.")
    if getattr(getattr(model, "options", None), "position_encoding", None) == "xpos":
        raise ValueError(f"position_encoding='xpos' cannot be exported. Train the {name} with 'rotary' or 'none'.")
    for needed in ("onnx", "onnxscript", "onnxruntime") if path.suffix == ".onnx" else ():
        if importlib.util.find_spec(needed) is None:
            raise ModuleNotFoundError(
                f"an .onnx file needs {needed}: pip install 'lightning-dilated[export]'.", name=needed
            )


def exported_program(
    model: DilatedModule, max_len: int, batch_size: int = 1, norms: bool = False
) -> torch.export.ExportedProgram:
    """Return the model as plain torch operations, for lengths 2 to `max_len`; `norms`: also decompose LayerNorm.

    Raises:
        ValueError: if an operation of this package remains.
    """
    example = model.export_inputs(max(2, min(max_len, 77)), batch_size)
    shapes = {"inputs": tuple({1: torch.export.Dim("length", min=2)} for _ in example)}
    whole = torch.export.export(
        _Positional(model, list(example), max_len), tuple(example.values()), dynamic_shapes=shapes
    )
    table = decompositions(max_len + model.export_rows)
    if norms:
        table[torch.ops.aten.layer_norm.default] = _layer_norm
    graph = whole.run_decompositions(table)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    if left := sorted({str(x) for x in calls if namespace_of(x) not in (None, "aten", "prims", "prim")}):
        raise ValueError(f"{type(model).__name__} cannot be exported: torch alone does not have {', '.join(left)}.")
    return graph


def decompositions(longest: int) -> dict[Any, Any]:
    """Return this package's operators as plain torch on one rank, for `ExportedProgram.run_decompositions`.

    Args:
        longest: maximum number of tokens in a sequence that the graph supports.
    """
    known: dict[Any, Any] = {}

    def attention(q, k, v, lengths, cu_seqlens, seed, spec, place=None):
        if lengths is not None or cu_seqlens is not None:
            raise ValueError("lengths and cu_seqlens cannot be exported: export whole sequences of one length.")
        out, lse = decomposed(q, k, v, decode(spec), longest, known)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def turn(joint, cos, sin, scale, heads, unrotated):
        return rotate(joint[:, :, :heads], joint[:, :, heads:], cos, sin, scale, unrotated)

    def cells(coords, counted, tile_size, grid):
        return cells_of(coords, counted, tile_size)

    ops = torch.ops.lightning_dilated
    return {ops.attention.default: attention, ops.turn.default: turn, ops.checked_cells.default: cells}


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    dims = list(range(-len(shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dims, keepdim=True)
    y = (centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)).to(x.dtype)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


class _Positional(nn.Module):
    """Call `model.export_outputs` with a tuple of tensors; for a length above `max_len`, indexing raises an error."""

    def __init__(self, model: DilatedModule, names: Sequence[str], max_len: int) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.limit: Tensor
        self.register_buffer("limit", torch.zeros(max_len, dtype=torch.int8))
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model.export_outputs(**dict(zip(self.names, inputs, strict=True)))
        last = torch.arange(inputs[0].shape[1], device=self.limit.device).amax(0, keepdim=True)
        nothing = self.limit.index_select(0, last).sum()
        return tuple(x + nothing.to(x.device, x.dtype) for x in outputs.values())


def _folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.parent


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Call modules without torch.compile inside the `with` block."""
    calls = [(m, call) for m in model.modules() if (call := compiled_call(m)) is not None]
    for m, _ in calls:
        set_compiled_call(m, None)
    try:
        yield
    finally:
        for m, call in calls:
            set_compiled_call(m, call)


def _write_onnx(graph: Any, path: Path, inputs: list[str], outputs: list[str]) -> Any:
    import onnxruntime

    program = torch.onnx.export(graph, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
    program.save(path, external_data=sum(x.nbytes for x in graph.state_dict.values()) > 1 << 30)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        return [torch.from_numpy(x) for x in session.run(None, {k: x.cpu().numpy() for k, x in tensors.items()})]

    return run


def _write_package(graph: Any, path: Path, inputs: list[str], outputs: list[str]) -> Any:
    package = compile_package(graph, str(path), INDUCTOR)

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        out = package(*tensors.values())
        return [out] if isinstance(out, Tensor) else list(out)

    return run


def _compare(model: DilatedModule, run: Any, length: int, batch_size: int, path: Path) -> float:
    """Return the largest relative difference between file and model; raise ValueError if it exceeds the tolerance."""
    inputs, error = model.export_inputs(length, batch_size), 0.0
    expected = model.export_outputs(**inputs)
    for (name, value), output in zip(expected.items(), run(inputs), strict=True):
        value = value.detach().cpu()
        largest = max(1.0, value.abs().max().item())
        difference = (output.cpu().double() - value.double()).abs().max().item() / largest
        if not difference <= TOLERANCE.get(value.dtype, 0.0):  # also true for NaN
            raise ValueError(
                f"{path.name} was not written: its {name} differs from the model's by {difference:.1e} of the largest "
                f"number at length {length}. Please report the model's settings."
            )
        error = max(error, difference)
    return error


def _described(tensors: dict[str, Tensor], length: int) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    shape = lambda x: tuple("length" if i == 1 and n == length else n for i, n in enumerate(x.shape))  # noqa: E731
    return {name: (str(x.dtype).removeprefix("torch."), shape(x)) for name, x in tensors.items()}
