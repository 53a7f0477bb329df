"""Implement `lightning-dilated export`: write a checkpoint's model as a file that runs without this package."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_dilated.cli.load_model import load_any, load_module
from lightning_dilated.ext.export.export import Exported, export
from lightning_dilated.ext.transformers import HFCausalLM

LOADED = {
    ".onnx": "{outputs} = onnxruntime.InferenceSession({path!r}).run(None, {{{names}}})",
    ".pt2": "{outputs} = torch._inductor.aoti_load_package({path!r})({names})",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "lightning-dilated export",
        description="Write the model of a checkpoint as a file that runs without this package, and compare the file "
        "with the model; or write a decoder of transformers as a plain folder.",
    )
    p.add_argument("--ckpt_path", type=Path, required=True, help="a .ckpt, or a folder that save_pretrained wrote")
    p.add_argument(
        "--out",
        type=Path,
        required=True,
        help="NAME.onnx for onnxruntime; NAME.pt2 for torch alone (AOTInductor); a folder for an HFCausalLM, which is "
        "written in the format of transformers, with its low-rank updates merged",
    )
    p.add_argument(
        "--max_len",
        type=int,
        help="maximum number of tokens (or tiles) in a sequence, at least 2 (default: the model's max_seq_len)",
    )
    p.add_argument("--batch_size", type=int, default=1, help="number of sequences of equal length in a call")
    return p


def summary(exported: Exported) -> str:
    """Describe the written file, line by line."""
    shown = lambda x: f"{x[0]} ({', '.join(map(str, x[1]))})"  # noqa: E731
    lines = [f"{exported.path}: {exported.path.stat().st_size:,} bytes, length from 2 to {exported.max_len:,}"]
    lines += [f"  input   {name}: {shown(x)}" for name, x in exported.inputs.items()]
    lines += [f"  output  {name}: {shown(x)}" for name, x in exported.outputs.items()]
    lengths = ", ".join(f"{n:,}" for n in exported.checked)
    lines.append(f"  checked against the model at lengths {lengths}: largest difference {exported.error:.1e}")
    names = [f'"{name}": {name}' if exported.path.suffix == ".onnx" else name for name in exported.inputs]
    outputs = ", ".join(exported.outputs) + ("," if len(exported.outputs) == 1 else "")  # both files return a sequence
    run_line = LOADED[exported.path.suffix].format(path=exported.path.name, names=", ".join(names), outputs=outputs)
    lines.append("  " + run_line)
    return "\n".join(lines)


def run(argv: list[str]) -> None:
    """Run the command: load the model, write and check the file, and print a summary.

    Raises:
        FileNotFoundError, ValueError, TypeError, ModuleNotFoundError: if `load_module` or `export` raises it.
    """
    args = parser().parse_args(argv)
    if args.out.suffix not in LOADED and isinstance(decoder := load_any(args.ckpt_path), HFCausalLM):
        decoder.save_pretrained(args.out, merge=True)
        print(f"{args.out}: a folder of transformers, {type(decoder.decoder).__name__}, from {args.ckpt_path}")
        return
    model = load_module(args.ckpt_path)
    max_len = args.max_len or getattr(model, "max_seq_len", None)
    if max_len is None:
        raise ValueError("the model has no max_seq_len: set --max_len to the largest number of tokens (or tiles).")
    print(summary(export(model, args.out, max_len, args.batch_size)))
