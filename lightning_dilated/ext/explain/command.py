"""Implement `lightning-dilated explain`: report what a pattern can see at a length, and what to change."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from lightning_dilated._validation import text_of
from lightning_dilated.cli.recipe import make_model, seq_len_of
from lightning_dilated.ext.explain.explanation import Explanation, explain, sight_table
from lightning_dilated.ext.explain.model import beyond_in_words, hashed_heads
from lightning_dilated.models.transformer import rotary_hint, served_length
from lightning_dilated.pattern import DilatedPattern, Hashed
from lightning_dilated.pattern.rows import cycle_to
from lightning_dilated.recurrence import Recurrence

#: required fields of `Sizes`, and the options that set them
OPTIONS = {"seq_len": "--seq_len", "num_heads": "--heads", "depth": "--depth"}


@dataclass(frozen=True)
class Sizes:
    """The patterns and sizes to explain; None for sizes that neither the recipe nor an option sets."""

    patterns: tuple[DilatedPattern, ...] = ()
    seq_len: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    depth: int | None = None
    head_dim: int = 64
    causal: bool = False
    rotary_bases: tuple[float | None, ...] = ()
    recurrences: tuple[Recurrence | None, ...] = ()
    hashed: tuple[Hashed | None, ...] = ()
    global_rotary: bool = True


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("lightning-dilated explain", description="What a pattern can and cannot see.")
    p.add_argument("--config", "-c", type=Path, help="take everything from a recipe; other options override it")
    p.add_argument("--segments", type=int, nargs="+", help="segment lengths of the branches")
    p.add_argument("--dilations", type=int, nargs="+", help="dilation rates of the branches")
    p.add_argument("--offsets", default="interleaved", help="interleaved or blocked (default %(default)s)")
    p.add_argument("--seq_len", "--seq-len", type=int, help="tokens")
    p.add_argument("--heads", type=int)
    p.add_argument("--kv_heads", "--kv-heads", type=int)
    p.add_argument("--head_dim", "--head-dim", type=int, help="head dim for the FLOPs (default: the recipe's, or 64)")
    p.add_argument("--depth", type=int, help="layers")
    p.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="(default: the recipe's, else both directions)"
    )
    return p


def sizes_of_recipe(path: Path, depth: int | None = None) -> Sizes:
    """Return the sizes of a recipe's model and data.

    Args:
        depth: number of layers; None: as in the recipe. Layers of hashed heads are numbers of single layers.

    Raises:
        ValueError: if the recipe lacks a model or a pattern, or its hashed heads need more layers; the message names it.
    """
    config = yaml.safe_load(text_of(path))
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(
            f"--config {path} has no model with a class_path: give --segments, --dilations, --heads instead."
        )
    seq_len = seq_len_of(path, config.get("data"))
    model = make_model(path, config["model"], seq_len)
    if depth is not None and any(getattr(model, "hashed", ())):
        arguments = {**(config["model"].get("init_args") or {}), "depth": depth}
        model = make_model(path, {**config["model"], "init_args": arguments}, seq_len)
    if not getattr(model, "patterns", None):
        raise ValueError(f"--config {path}: the model, {type(model).__name__}, has no pattern to explain.")
    heads, dim = getattr(model, "num_heads", None), getattr(model, "dim", None)
    options = getattr(model, "options", None)
    rotary = getattr(options, "position_encoding", "none") == "rotary"
    return Sizes(
        model.patterns, seq_len, heads, model.num_kv_heads, model.depth,
        dim // heads if dim and heads else 64, getattr(model, "causal", False), model.rotary_bases if rotary else (),
        tuple(getattr(model, "recurrences", ())), tuple(getattr(model, "hashed", ())),
        getattr(options, "global_rotary", True),
    )  # fmt: skip


def resolve_sizes(args: argparse.Namespace) -> Sizes:
    """Return the recipe's sizes, overridden by the options.

    Raises:
        ValueError: if sizes are missing; the message names their options.
    """
    sizes = sizes_of_recipe(args.config, args.depth) if args.config else Sizes()
    if (args.segments is None) != (args.dilations is None):
        raise ValueError("--segments and --dilations belong together: one rate for every segment length.")
    if args.segments:
        pattern = DilatedPattern.longnet(args.segments, args.dilations, offsets=args.offsets)
        own = {"rotary_bases": (), "recurrences": (), "hashed": (), "global_rotary": True}
        sizes = replace(sizes, patterns=(pattern,), **own)
    options = {"seq_len": args.seq_len, "num_heads": args.heads, "num_kv_heads": args.kv_heads, "depth": args.depth}
    options |= {"head_dim": args.head_dim, "causal": args.causal}
    if args.heads and not args.kv_heads:
        sizes = replace(sizes, num_kv_heads=None)
    sizes = replace(sizes, **{k: v for k, v in options.items() if v is not None})
    missing = [] if sizes.patterns else ["--segments and --dilations"]
    missing += [option for name, option in OPTIONS.items() if getattr(sizes, name) is None]
    if missing:
        raise ValueError(f"explain needs {', '.join(missing)}, or a recipe that has them: --config RECIPE.yaml.")
    return sizes


def table(sizes: Sizes, result: Explanation) -> list[str]:
    """Return the lines of the report."""
    of_layer = lambda layer: f" of layer {layer}" if len(result.patterns) > 1 else ""  # noqa: E731
    dead = [
        f"branches[{result.patterns[layer].listed(i)[0]}]{of_layer(layer)}: {len(x)} of "
        f"{result.patterns[layer].branches[i].dilation_rate}"
        for (layer, i), x in result.dead_residues.items()
    ]
    full = "never" if result.layers_to_full_reach is None else f"{result.layers_to_full_reach}"
    reach = "not searched at this length" if result.reach is None else f"{full} ({result.reach:.1%} in {result.depth})"
    layer = result.flops(sizes.head_dim)
    walls = f"{len(result.walls)}, the first at position {result.walls[0]:,}" if result.walls else "none"
    times = result.dense_pairs / max(1, result.pairs)
    dense = result.dense_pairs / result.pattern_heads / result.seq_len
    rows = {
        "walls": walls,
        "dead residues": "; ".join(dead) or "none",
        "rows without any key": f"{result.uncovered:.1%}" if result.uncovered else "none",
        "layers to full reach": reach,
        "keys per row": f"{result.keys_per_row:,.1f}, dense {dense:,.1f}",
        "forward FLOPs": f"{layer:.3g} a layer, {layer * result.depth:.3g} in all, dense {times:.1f} times",
    }
    kind = "causal" if result.causal else "both directions"
    head = f"{result.seq_len:,} tokens, {result.num_heads} heads of {sizes.head_dim}, {result.depth} layers, {kind}"
    lines = [*result.layers_in_words, head, "", *(f"  {name:<22}{value}" for name, value in rows.items())]
    lines += [f"  {'' if i else 'sight':<22}{line}" for i, line in enumerate(sight_table(result.sight))]
    recurrences = cycle_to(sizes.recurrences, result.depth) if sizes.recurrences else ()
    if beyond := beyond_in_words(recurrences, sizes.hashed, sizes.head_dim):
        lines.append(f"  {'beyond the pattern':<22}{beyond}")
    ranges = rotary_table(sizes.rotary_bases) + ["no positions (dense heads)"] * (not sizes.global_rotary)
    return lines + [f"  {'rotary range':<22}{line}" for line in ranges]


def rotary_table(bases: tuple[float | None, ...]) -> list[str]:
    """Return a line for each rotary base of the layers, with the largest query-key distance that the base serves."""
    lines = []
    for base in dict.fromkeys(bases):
        layers = [str(i) for i, x in enumerate(bases) if x == base]
        which = "all layers" if len(layers) == len(bases) else f"layers {', '.join(layers)}"
        served = "no positions" if base is None else f"base {base:g} serves {served_length(base):,} tokens"
        lines.append(f"{served} ({which})")
    return lines


def run(argv: list[str]) -> None:
    """Run the command: print the table, and suggest a change for each problem."""
    sizes = resolve_sizes(parser().parse_args(argv))
    arguments = sizes.seq_len, sizes.num_heads, sizes.depth, sizes.causal, sizes.num_kv_heads
    by_code = hashed_heads(sizes.hashed, sizes.num_heads, sizes.num_kv_heads or sizes.num_heads)
    result = explain(sizes.patterns, *arguments, by_code)
    print("\n".join([*table(sizes, result), ""]))
    hints = list(result.hints)
    if sizes.rotary_bases:
        layers = cycle_to(sizes.patterns, len(sizes.rotary_bases))
        hint = rotary_hint(sizes.rotary_bases, layers, sizes.seq_len, global_rotary=sizes.global_rotary)
        hints += [hint] if hint else []
    print("\n".join(f"  problem: {hint}" for hint in hints) or "  no problems")
