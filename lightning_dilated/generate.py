"""`lightning-dilated generate`: continue a prompt with a byte model from a checkpoint."""

from __future__ import annotations

import argparse
import sys

import torch

from lightning_dilated.checkpoint import load_byte_model
from lightning_dilated.models.generation import check_sampling


def parser() -> argparse.ArgumentParser:
    """The options of `generate`."""
    p = argparse.ArgumentParser("lightning-dilated generate", description="Continue a prompt with a byte model.")
    p.add_argument("--ckpt_path", required=True, help="checkpoint of a LongNetLM over bytes")
    p.add_argument("--prompt", required=True, help="text to continue; - reads standard input")
    p.add_argument("--max_new_bytes", type=int, default=256, help="bytes to add (default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte (default %(default)s)")
    p.add_argument("--top_k", type=int, help="draw from the k likeliest bytes only")
    p.add_argument("--top_p", type=float, help="draw from the likeliest bytes that hold this probability")
    p.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default %(default)s)")
    return p


def check_device(name: str) -> None:
    """Raise unless the device exists here."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; use cpu, cuda or cuda:1.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA device. Leave --device out to use the CPU.")


def run(argv: list[str]) -> None:
    """Parse, load, generate, and print the prompt with its continuation."""
    args = parser().parse_args(argv)
    prompt = (sys.stdin.read() if args.prompt == "-" else args.prompt).encode()
    if not prompt:
        raise ValueError("--prompt is empty; give at least one character to continue.")
    if args.max_new_bytes < 0:
        raise ValueError(f"--max_new_bytes must be at least 0, got {args.max_new_bytes}.")
    check_sampling(args.temperature, args.top_k, args.top_p)
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must lie in 0..2^63 - 1, got {args.seed}.")
    check_device(args.device)
    model = load_byte_model(args.ckpt_path).to(args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    tokens = torch.tensor(list(prompt), device=args.device)[None]
    out = model.generate(
        tokens,
        args.max_new_bytes,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=generator,
    )
    print(bytes(out[0].tolist()).decode(errors="replace"))
