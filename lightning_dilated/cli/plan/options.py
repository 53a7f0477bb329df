"""The command line of `plan`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from lightning_dilated.memory.recompute import POLICIES
from lightning_dilated.planning.counting.dry_run import PRECISIONS
from lightning_dilated.planning.gpus import GPUS
from lightning_dilated.planning.memory import OPTIMIZERS, STRATEGIES
from lightning_dilated.sequence.exchange import EXCHANGES

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: the pattern of the measurements, where neither options nor a recipe have one
SEGMENTS, DILATIONS = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]
#: GPUs of a node
NODE = 8


def number(text: str) -> int:
    """8192, 64K, 8M or 1G, in powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)", text.strip().upper().replace(",", "").replace("_", ""))
    value = float(found[1]) * UNITS[found[2]] if found else 0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number such as 8192, 64K, 8M or 1G")
    return int(value)


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        "lightning-dilated plan",
        description="Memory, bytes, time and the longest sequence of a run, without a GPU. Numbers may end in K, M or G "
        "(powers of 1024).",
    )
    p.add_argument("--config", "-c", type=Path, help="take everything from a recipe; what is given beside it wins")
    _model(p.add_argument_group("model"))
    _machine(p.add_argument_group("machine"))
    _memory(p.add_argument_group("memory settings (default: all are compared, and one is recommended)"))
    p.add_argument(
        "--find_max", "--find-max", action="store_true", help="true steps on the devices that are here (see its --help)"
    )
    p.add_argument("--plot", type=Path, help="draw memory by kind of each setting to this PNG")
    return p


def _model(p: Any) -> None:
    p.add_argument("--dim", type=number)
    p.add_argument("--depth", type=number, help="blocks; of the encoder where there is a decoder, too")
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
        "--residual_dtype", "--residual-dtype", choices=["float32", "bfloat16"], help="of states between blocks"
    )


def _machine(p: Any) -> None:
    p.add_argument(
        "--tokens",
        type=number,
        help="of a sequence, on all its ranks: of a text; rows of a slide, which are its tiles and one for the class token; "
        "patches of an image (default: the recipe's)",
    )
    p.add_argument("--gpus", type=number, help="in all; they share every sequence (default: the recipe's, else 1)")
    p.add_argument("--gpu", default="H200", help=f"{', '.join(GPUS)} (default %(default)s)")
    p.add_argument("--gpu_memory", "--gpu-memory", type=float, metavar="GIB", help="of each GPU, if another one")
    p.add_argument("--nodes", type=number, help=f"(default {NODE} GPUs each)")
    p.add_argument("--host_memory", "--host-memory", type=float, default=0.0, metavar="GIB", help="of a node, to be "
                   "used for block inputs (default none: nothing of them is offloaded) and what --cpu_offload keeps there "
                   "(default: not limited)")  # fmt: skip
    p.add_argument("--precision", choices=list(PRECISIONS), help="(default: the recipe's, else bf16-mixed)")
    p.add_argument("--strategy", choices=STRATEGIES, help="(default: the recipe's; else single for one GPU, "
                   "ring_dilated, or ring_dilated_fsdp where parameters and states would take half a GPU)")  # fmt: skip
    p.add_argument("--cpu_offload", "--cpu-offload", action=argparse.BooleanOptionalAction, help="parameters, gradients and "
                   "optimizer states on the host, with ring_dilated_fsdp (default: the recipe's, else no)")  # fmt: skip
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default %(default)s)")
    p.add_argument("--exchange", choices=["auto", *EXCHANGES], help="(default: the recipe's, else auto)")
    p.add_argument(
        "--links", type=Path, help="file of `lightning-dilated bench links` (default: those taken for the GPU)"
    )


def _memory(p: Any) -> None:
    p.add_argument("--policy", choices=POLICIES)
    p.add_argument("--every", type=number, help="blocks of a group")
    p.add_argument("--offload", type=float, help="fraction of block inputs up to 1, GiB of a rank above 1")
    p.add_argument("--tile", type=number, help="tokens")
    p.add_argument("--head_chunks", "--head-chunks", type=number, help="windows of heads")
