"""Parse the options of `lightning-dilated plan`, and complete them with a recipe's values.

Shape letters: N tokens of the sequence, R ranks.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_dilated._validation import text_of
from lightning_dilated.cli.recipe import class_of, make_model, seq_len_of
from lightning_dilated.ext.planning.counting.dry_run import PRECISIONS
from lightning_dilated.ext.planning.gpus import GPUS, Gpu, find_gpu
from lightning_dilated.ext.planning.setup import OPTIMIZERS, STRATEGIES, Setup
from lightning_dilated.memory.recompute import POLICIES
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.longnet.lm import LongNetLM
from lightning_dilated.models.transformer_model import options_of
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.shard import check_exchange_memory
from lightning_dilated.strategy import RingDilatedFSDPStrategy, RingDilatedStrategy, launched_nodes
from lightning_dilated.strategy.layout import layout_for
from lightning_dilated.strategy.mesh import MeshSizes

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: the default pattern, which was also measured
SEGMENTS, DILATIONS = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]
#: GPUs of a node
NODE = 8


def number(text: str) -> int:
    """Parse a number such as 8192, 64K, 8M or 1G; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)", text.strip().upper().replace(",", "").replace("_", ""))
    value = float(match[1]) * UNITS[match[2]] if match else 0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number such as 8192, 64K, 8M or 1G")
    return int(value)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "lightning-dilated plan",
        description="Memory, bytes, time and the longest sequence of a run, without a GPU. Numbers may end in K, M or G "
        "(powers of 1024).",
    )
    p.add_argument("--config", "-c", type=Path, help="take everything from a recipe; other options override it")
    _model(p.add_argument_group("model"))
    _machine(p.add_argument_group("machine"))
    _memory(p.add_argument_group("memory settings (default: all are compared, and one is recommended)"))
    p.add_argument("--plot", type=Path, help="draw each setting's memory by kind to this PNG file")
    return p


def _model(p: Any) -> None:
    p.add_argument("--dim", type=number)
    p.add_argument("--depth", type=number, help="number of blocks (in a model with a decoder: of encoder blocks)")
    p.add_argument("--heads", type=number)
    p.add_argument("--kv_heads", "--kv-heads", type=number)
    p.add_argument("--ffn_dim", "--ffn-dim", type=number)
    p.add_argument("--vocab", type=number, help="(default 256)")
    p.add_argument("--segments", type=number, nargs="+", help=f"(default {' '.join(map(str, SEGMENTS))})")
    p.add_argument("--dilations", type=number, nargs="+", help=f"(default {' '.join(map(str, DILATIONS))})")
    p.add_argument("--geometric", type=number, metavar="FIRST", help="branches (FIRST, 1), (2 FIRST, 2), ... up to N")
    p.add_argument("--offsets", help="interleaved or blocked (default interleaved)")
    p.add_argument("--causal", action=argparse.BooleanOptionalAction, help="(default: the recipe's, else causal)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="blocks (default: the recipe's, else yes)")
    p.add_argument(
        "--residual_dtype", "--residual-dtype", choices=["float32", "bfloat16"], help="dtype of states between blocks"
    )


def _machine(p: Any) -> None:
    p.add_argument(
        "--tokens",
        type=number,
        help="length of a sequence, on all its ranks together; for a slide, the number of tiles plus 1 for the class "
        "token (default: the recipe's)",
    )
    p.add_argument("--gpus", type=number, help="number of GPUs that share every sequence (default: the recipe's, or 1)")
    p.add_argument("--gpu", default="H200", help=f"{', '.join(GPUS)} (default %(default)s)")
    p.add_argument("--gpu_memory", "--gpu-memory", type=float, metavar="GIB", help="memory of each GPU, if it differs")
    p.add_argument("--nodes", type=number, help=f"(default {NODE} GPUs each)")
    p.add_argument("--host_memory", "--host-memory", type=float, default=0.0, metavar="GIB", help="memory of a "
                   "node for offloaded block inputs and --cpu_offload (default: block inputs are not offloaded, and "
                   "--cpu_offload is not limited)")  # fmt: skip
    p.add_argument("--precision", choices=list(PRECISIONS), help="(default: the recipe's, else bf16-mixed)")
    p.add_argument("--strategy", choices=STRATEGIES, help="(default: the recipe's; else single for one GPU, "
                   "else ring_dilated, or ring_dilated_fsdp if parameters and states fill half a GPU)")  # fmt: skip
    p.add_argument("--cpu_offload", "--cpu-offload", action=argparse.BooleanOptionalAction, help="parameters, gradients and "
                   "optimizer states on the host, with ring_dilated_fsdp (default: the recipe's, else no)")  # fmt: skip
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default %(default)s)")
    p.add_argument("--exchange", choices=["auto", *EXCHANGES], help="(default: the recipe's, else auto)")
    p.add_argument("--exchange_memory_gib", "--exchange-memory-gib", type=float, metavar="GIB", help="memory for other "
                   "ranks' rows in a call (default: the recipe's, else not limited)")  # fmt: skip
    p.add_argument("--head_size", "--head-size", type=_head_size, metavar="RANKS", help="number of ranks that "
                   "exchange tokens for heads; auto: choose it and print it (default: the recipe's, or 1)")  # fmt: skip
    p.add_argument(
        "--links", type=Path, help="file of `lightning-dilated bench links` (default: speeds assumed for the GPU)"
    )


def _head_size(text: str) -> int | str:
    """Parse auto, or a number."""
    return "auto" if text == "auto" else number(text)


def _memory(p: Any) -> None:
    p.add_argument("--policy", choices=POLICIES)
    p.add_argument("--every", type=number, help="number of blocks in a group")
    p.add_argument("--offload", type=float, help="up to 1: fraction of block inputs; above 1: GiB of each rank")
    p.add_argument("--tile", type=number, help="number of tokens in a tile")
    p.add_argument("--head_chunks", "--head-chunks", type=number, help="number of head windows")
    p.add_argument(
        "--stream", type=number, help="number of tokens in a chunk; if given alone, it applies to all compared settings"
    )


#: strategies on several GPUs that can be planned, by the names that the Trainer accepts
OURS = {"ring_dilated_fsdp": RingDilatedFSDPStrategy, "ring_dilated": RingDilatedStrategy}
CALLBACK = "ActivationRecompute"
#: options with names that differ from the model's arguments
OPTIONS = {"num_heads": "--heads", "num_kv_heads": "--kv_heads", "vocab_size": "--vocab"}


@dataclass(frozen=True)
class Request:
    """A run to plan.

    Attributes:
        tokens: N; None: each setting is planned at its longest sequence.
        settings: the memory settings to plan; None: the plan compares several.
        stream: number of tokens in a chunk, in all compared settings; None: the plan may propose settings with chunks.
        host: GiB of host memory of a rank.
        strategy: name of the strategy; None: the plan chooses one.
        batch: number of sequences in the recipe's batch, used in notes.
        streams: number of streams on all data ranks of the recipe, used in notes.
        shared_by: number of GPUs that share a sequence, from the recipe's sequence_size, for a note; None: all GPUs.
        outer: whether the recipe's strategy takes outer steps, used in a note.
        exchange_memory: the strategy's exchange_memory_gib, in bytes.
        data_ranks: the recipe's number of GPUs divided by the planned number; see `Setup`.
        recipe: the recipe with the options' values, without planned settings; None: no recipe can express the options.
    """

    model: DilatedModule
    tokens: int | None
    gpu: Gpu
    ranks: int
    per_node: int
    precision: str
    compile_blocks: bool
    settings: MemorySettings | None
    host: float
    strategy: str | None
    optimizer: str
    exchange: str
    links: Links
    residual: str | None
    batch: int = 1
    cpu_offload: bool = False
    bucket_cap_mb: int | None = None
    layout: str = "contiguous"
    streams: int = 0
    shared_by: int | None = None
    outer: bool = False
    head_size: int | str = 1
    exchange_memory: int | None = None
    stream: int | None = None
    data_ranks: int = 1
    recipe: dict[str, Any] | None = None

    def setup(self, strategy: str) -> Setup:
        bucket = self.bucket_cap_mb if strategy == "ring_dilated" else None
        return Setup(
            strategy, self.ranks, self.per_node, self.optimizer, self.exchange, self.links, self.cpu_offload, bucket,
            self.exchange_memory, self.data_ranks, "contiguous" if self.layout == "chunked" else self.layout, self.head_size,
        )  # fmt: skip


def resolve_request(args: argparse.Namespace) -> Request:
    """Complete the options with the recipe's values.

    Raises:
        ValueError, OSError: if an option is missing or invalid; the message names it.
    """
    config = _recipe(args.config)
    trainer = config.get("trainer") or {}
    model = _from_recipe(args, config) if config else _from_sizes(args, args.tokens)
    tokens = args.tokens or (_tokens(args.config, model, config.get("data")) if config else None)
    recipe = _strategy(args.config, trainer.get("strategy"))
    ranks, per_node = _ranks(args, trainer)
    chosen = args.strategy or recipe.name
    offload = recipe.cpu_offload and chosen == recipe.name if args.cpu_offload is None else args.cpu_offload
    if chosen is None and (offload or ranks == 1):
        chosen = "ring_dilated_fsdp" if offload else "single"
    if offload and chosen != "ring_dilated_fsdp":
        raise ValueError(f"--cpu_offload goes with --strategy ring_dilated_fsdp only, not with {chosen}.")
    if chosen == "single" and ranks > 1:
        raise ValueError(f"--strategy single is for one GPU, not for {ranks}. Use ring_dilated or ring_dilated_fsdp.")
    compiled = getattr(model, "compile_blocks", False) if config else True
    if not 0 <= args.host_memory < float("inf"):
        raise ValueError(f"--host_memory must be GiB of a node, 0 for none; got {args.host_memory!r}.")
    precision = args.precision or trainer.get("precision") or "bf16-mixed"
    if precision not in PRECISIONS:
        raise ValueError(f"--precision must be one of {', '.join(PRECISIONS)}; the recipe has {precision!r}.")
    gpu = find_gpu(args.gpu, args.gpu_memory)
    settings, exchange = _settings(args, trainer.get("callbacks")), args.exchange or recipe.exchange
    links = Links.load(args.links) if args.links else gpu.links
    head_size = recipe.head_size if args.head_size is None else args.head_size
    exchange_memory = check_exchange_memory(args.exchange_memory_gib or recipe.exchange_memory_gib)
    layout = recipe.layout
    if layout == "auto":
        longest = (
            None if _number_of(config.get("data"), "pack_tokens", 0) else tokens or getattr(model, "max_seq_len", None)
        )
        nodes = {
            "ranks_per_node": per_node if per_node < ranks else None,
            "head_size": 1 if head_size == "auto" else head_size,
        }
        prices = {**nodes, "links": links, "exchange_memory": exchange_memory}
        layout = layout_for(model, longest, ranks, exchange, args.stream or getattr(settings, "stream", None), prices)
    return Request(
        model, tokens, gpu, ranks, per_node, precision,
        compiled if args.compile is None else args.compile, settings,
        args.host_memory / per_node, chosen, args.optimizer, exchange, links,
        getattr(getattr(model, "options", None), "residual_dtype", None),
        _number_of(config.get("data"), "batch_size", 1),
        offload, recipe.bucket_cap_mb, layout, _number_of(config.get("data"), "streams", 0),
        _shared_by(trainer.get("strategy"), ranks, ranks // per_node),
        bool(_init_args(trainer.get("strategy")).get("outer")),
        head_size, exchange_memory, args.stream,
        max(1, _recipe_ranks(trainer) // ranks), _with_options(args, config, model, precision),
    )  # fmt: skip


def _with_options(
    args: argparse.Namespace, config: dict[str, Any], model: DilatedModule, precision: str
) -> dict[str, Any] | None:
    if config:
        arguments, data = _arguments(args, config, type(model)), config.get("data")
        if args.tokens and seq_len_of(args.config, data) is not None:
            data = {**(data or {}), "init_args": {**_init_args(data), "seq_len": args.tokens}}
    elif model.causal:
        arguments = _size_arguments(args, args.tokens)
        data = {"class_path": "lightning_dilated.data.ByteDataModule", "init_args": {"seq_len": args.tokens}}
    else:  # no recipe: a LongNetLM is causal, and no option selects another class
        return None
    if not config or args.compile is not None:
        arguments["compile_blocks"] = args.compile is not False
    trainer = {**(config.get("trainer") or {}), "precision": precision}
    if args.gpus or args.nodes:
        trainer = {name: value for name, value in trainer.items() if name not in ("devices", "num_nodes")}
    class_path = (config.get("model") or {}).get("class_path", "lightning_dilated.LongNetLM")
    recipe = {**config, "trainer": trainer, "model": {"class_path": class_path, "init_args": arguments}}
    return recipe if data is None else {**recipe, "data": data}


def _recipe(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    config = yaml.safe_load(text_of(path))
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(f"--config {path} has no model with a class_path: give --dim, --depth and --heads instead.")
    return config


def _from_recipe(args: argparse.Namespace, config: dict[str, Any]) -> DilatedModule:
    """Build the recipe's model; sizes that are given as options replace its own.

    Raises:
        ValueError: if the model has no argument for an option; the message names the option.
    """
    model = config["model"]
    cls = class_of(args.config, model.get("class_path", "LongNetLM"), "lightning_dilated")
    changed = {**model, "init_args": _arguments(args, config, cls)}
    return make_model(args.config, changed, seq_len_of(args.config, config.get("data")))


def _arguments(args: argparse.Namespace, config: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return the recipe's arguments of the model, updated with given options; raise the errors of `_from_recipe`."""
    takes = options_of(cls)
    options = _sizes(args)
    if args.causal is not None:
        options["causal"] = args.causal
    for name, value in options.items():
        if name not in takes:
            raise ValueError(
                f"{OPTIONS.get(name, '--' + name)} {value}: a {cls.__name__} has no {name}. Leave the option out."
            )
    arguments = {**_init_args(config["model"]), **options}
    if args.segments or args.dilations or args.geometric:
        arguments |= _branches(args, cls, "segment_lengths" not in takes)
    return arguments


def _branches(args: argparse.Namespace, cls: type, whole: bool) -> dict[str, Any]:
    """Return the pattern of the options as arguments of the model: `pattern` if `whole`, else lists of its branches."""
    pattern = _pattern(args, args.tokens)
    if whole:
        return {"pattern": pattern.to_dict()}
    if args.offsets:
        raise ValueError(f"--offsets {args.offsets}: the offsets of a {cls.__name__} are fixed. Leave the option out.")
    lists = {"segment_lengths": "segment_length", "dilation_rates": "dilation_rate"}
    lists_of_branches = {name: [getattr(b, field) for b in pattern.branches] for name, field in lists.items()}
    return lists_of_branches | ({"max_wsi_size": None} if "max_wsi_size" in options_of(cls) else {})


def _tokens(path: Path, model: DilatedModule, data: Any) -> int | None:
    """Return N of the recipe's data: its seq_len or the default, else the rows of the largest slide, else None."""
    if not data and "labels" not in getattr(model.sequence_spec, "dims", ()):
        return None
    most = _init_args(data).get("max_tiles")
    return seq_len_of(path, data) or (most + 1 if isinstance(most, int) and hasattr(model, "tile_size") else None)


def _init_args(entry: Any) -> dict[str, Any]:
    """Return the init_args of a recipe's entry; an empty dict if the entry is a plain name."""
    return (entry.get("init_args") or {}) if isinstance(entry, dict) else {}


def _number_of(data: Any, name: str, default: int) -> int:
    """Return the argument `name` of a recipe's data if it is an integer above 0, else `default`."""
    size = _init_args(data).get(name)
    return size if isinstance(size, int) and size > 0 else default


def _from_sizes(args: argparse.Namespace, tokens: int | None) -> DilatedModule:
    missing = [f"--{name}" for name in ("dim", "depth", "heads") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"plan needs {', '.join(missing)}, or a recipe that sets them: --config RECIPE.yaml.")
    model = LongNetLM(**_size_arguments(args, tokens), bytes_per_token=1.0)
    model.causal = args.causal is not False
    return model


def _size_arguments(args: argparse.Namespace, tokens: int | None) -> dict[str, Any]:
    """Return the arguments of a LongNetLM with the pattern and sizes of the options."""
    return {"pattern": _pattern(args, tokens).to_dict(), "vocab_size": 256, **_sizes(args)}


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that are given as options, by the model's argument names."""
    sizes = {"dim": args.dim, "depth": args.depth, "num_heads": args.heads, "num_kv_heads": args.kv_heads}
    sizes |= {"ffn_dim": args.ffn_dim, "vocab_size": args.vocab, "residual_dtype": args.residual_dtype}
    return {name: size for name, size in sizes.items() if size is not None}


def _pattern(args: argparse.Namespace, tokens: int | None) -> DilatedPattern:
    offsets = {"offsets": args.offsets} if args.offsets else {}
    if args.geometric:
        if args.segments or args.dilations:
            raise ValueError("give --geometric or --segments and --dilations, not both.")
        if tokens is None:
            raise ValueError("--geometric ends with a segment over the whole sequence: give --tokens as well.")
        last = args.geometric << max(0, (-(-tokens // args.geometric) - 1).bit_length())
        return DilatedPattern.geometric(args.geometric, last, **offsets)
    if (args.segments is None) != (args.dilations is None):
        raise ValueError("--segments and --dilations belong together: one rate for every segment length.")
    return DilatedPattern.longnet(args.segments or SEGMENTS, args.dilations or DILATIONS, **offsets)


@dataclass(frozen=True)
class StrategyOptions:
    """The strategy options of a recipe that a plan uses; `name` is one of STRATEGIES, or None."""

    name: str | None
    exchange: str
    cpu_offload: bool
    bucket_cap_mb: int | None
    layout: str
    head_size: int | str
    exchange_memory_gib: float | None


def _strategy(path: Path, strategy: Any) -> StrategyOptions:
    options = _init_args(strategy)
    name = str(strategy.get("class_path") if isinstance(strategy, dict) else strategy or "")
    cls = class_of(path, name, "lightning_dilated") if "." in name or name[:1].isupper() else None
    ours = (
        kind
        for kind, base in OURS.items()
        if name.startswith(kind) or (isinstance(cls, type) and issubclass(cls, base))
    )
    return StrategyOptions(
        next(ours, None),
        options.get("exchange", "auto"),
        options.get("cpu_offload", False) is not False,
        options.get("bucket_cap_mb"),
        options.get("layout", "auto"),
        options.get("head_size", 1),
        options.get("exchange_memory_gib"),
    )


def _shared_by(strategy: Any, ranks: int, nodes: int) -> int | None:
    """Return how many GPUs share a sequence by the recipe's sequence_size and regions; None: all, or invalid values."""
    options = _init_args(strategy)
    regions = options.get("regions", 1)
    try:
        sizes = MeshSizes(ranks, options.get("sequence_size", "auto"), regions=nodes if regions == "auto" else regions)
        size = sizes.sequence_size
    except (TypeError, ValueError):  # the run itself will raise this error
        return None
    return None if size == ranks else int(size)


def _ranks(args: argparse.Namespace, trainer: dict[str, Any]) -> tuple[int, int]:
    """Return (R, number of ranks on a node)."""
    ranks = args.gpus or _recipe_ranks(trainer)
    nodes = args.nodes or -(-ranks // NODE)
    if ranks % nodes:
        raise ValueError(f"--nodes {nodes} must divide --gpus {ranks}, which counts the GPUs of all nodes.")
    return ranks, ranks // nodes


def _recipe_ranks(trainer: dict[str, Any]) -> int:
    """Return the recipe's number of GPUs; 1 if it names none."""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    nodes = launched_nodes() if nodes == "auto" else nodes
    local = devices if isinstance(devices, int) and devices > 0 else len(devices) if isinstance(devices, list) else 1
    return local * (nodes if isinstance(nodes, int) else 1)


def _settings(args: argparse.Namespace, callbacks: Any) -> MemorySettings | None:
    """Return the settings of the recipe's callback, updated with options; None if no option but `--stream` is given."""
    options = {n: getattr(args, n) for n in ("policy", "every", "offload", "tile", "head_chunks", "stream")}
    options = {k: v for k, v in options.items() if v is not None}
    if not options.keys() - {"stream"}:
        return None
    for callback in callbacks if isinstance(callbacks, list) else []:
        if isinstance(callback, dict) and str(callback.get("class_path", "")).endswith(CALLBACK):
            options = {"policy": "block", **_init_args(callback), **options}
    defaults = {"policy": "block"} if {"every", "offload"} & set(options) else {}
    return MemorySettings(**{**defaults, **options})
