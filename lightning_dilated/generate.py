"""`lightning-dilated generate`: continue a prompt with a byte model from a checkpoint."""

from __future__ import annotations

import argparse
import codecs
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import yaml

from lightning_dilated.checkpoint import load_byte_model
from lightning_dilated.models.generation import check_sampling


def parser() -> argparse.ArgumentParser:
    """The options of `generate`."""
    p = argparse.ArgumentParser("lightning-dilated generate", description="Continue a prompt with a byte model.")
    p.add_argument("--config", "-c", type=Path, help="a yaml of these options; what is given beside it wins")
    p.add_argument("--ckpt_path", help="checkpoint, or folder of save_pretrained, of a byte LongNetLM")
    p.add_argument("--prompt", help="text to continue; - reads standard input")
    p.add_argument("--max_new_bytes", type=int, default=256, help="bytes to add (default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte (default %(default)s)")
    p.add_argument("--top_k", type=int, help="draw from the k likeliest bytes only")
    p.add_argument("--top_p", type=float, help="draw from the likeliest bytes that hold this probability")
    p.add_argument("--stop", help=r"a character of one byte that ends the text, such as '\n'")
    p.add_argument("--stream", action="store_true", help="print bytes as they are drawn")
    p.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default %(default)s)")
    return p


def parsed(argv: list[str]) -> argparse.Namespace:
    """The options: the parser's defaults, over them the config's, over them the command line's."""
    p = parser()
    config = p.parse_args(argv).config
    if config is not None:
        values = yaml.safe_load(config.read_text())
        known = {a.dest: a for a in p._actions if a.dest not in ("help", "config")}
        if not isinstance(values, dict) or not set(values) <= set(known):
            wrong = sorted(set(values) - set(known)) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"--config {config} of generate holds {wrong}; its keys are {', '.join(known)}.")
        p.set_defaults(**{k: _typed(config, known[k], v) for k, v in values.items() if v is not None})
    args = p.parse_args(argv)
    missing = [f"--{name}" for name in ("ckpt_path", "prompt") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"generate needs {' and '.join(missing)}.")
    return args


def _typed(config: Path, action: argparse.Action, value: object) -> object:
    """A value of a config, as its option would read it."""
    kind = bool if action.nargs == 0 else action.type or str
    if isinstance(value, bool) != (kind is bool):
        raise ValueError(f"--config {config}: {action.dest} must be of type {kind.__name__}, got {value!r}.")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"--config {config}: {action.dest} must be of type {kind.__name__}, got {value!r}.") from None


def check_device(name: str) -> None:
    """Raise unless the device exists here."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; use cpu, cuda or cuda:1.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA device. Leave --device out to use the CPU.")


def stop_byte(text: str | None) -> int | None:
    """The byte that ends the text, from a character or its escape."""
    if text is None:
        return None
    try:
        found = codecs.decode(text, "unicode_escape") if text.startswith("\\") else text
    except UnicodeDecodeError:
        found = ""
    if len(found.encode()) != 1:
        raise ValueError(rf"--stop takes one character of one byte, such as . or '\n'; got {text!r}.")
    return ord(found)


def print_bytes(chunks: Iterable[bytes]) -> None:
    """Print UTF-8 text as its bytes come; what is no text is shown as the replacement character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in chunks:
        print(decoder.decode(chunk), end="", flush=True)
    print(decoder.decode(b"", final=True))


def run(argv: list[str]) -> None:
    """Parse, load, generate, and print the prompt with its continuation."""
    args = parsed(argv)
    prompt = (sys.stdin.read() if args.prompt == "-" else args.prompt).encode()
    if not prompt:
        raise ValueError("--prompt is empty; give at least one character to continue.")
    if args.max_new_bytes < 0:
        raise ValueError(f"--max_new_bytes must be at least 0, got {args.max_new_bytes}.")
    check_sampling(args.temperature, args.top_k, args.top_p)
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must lie in 0..2^63 - 1, got {args.seed}.")
    stop = stop_byte(args.stop)
    check_device(args.device)
    model = load_byte_model(args.ckpt_path).to(args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    tokens = torch.tensor(list(prompt), device=args.device)[None]
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    drawn = model.generate_stream(tokens, args.max_new_bytes, **options, generator=generator, stop=stop)
    following = (bytes(step.tolist()) for step in drawn)
    print_bytes(itertools.chain([prompt], following) if args.stream else [prompt + b"".join(following)])
