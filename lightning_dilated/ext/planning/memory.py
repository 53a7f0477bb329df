"""Estimate a rank's memory by kind at the peak of a step, and plot the memory of several settings.

Shape letters: N tokens of the sequence, L tokens of a rank.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_dilated.ext.planning.counting.footprint import Exchanged, Footprint, Moment, of_subject, sharded
from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
)
from lightning_dilated.ext.planning.counting.model_specs import blank
from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule

GIB = 2**30
COLOURS = {
    PARAMETERS: "tab:purple",
    GRADIENTS: "tab:green",
    OPTIMIZER: "tab:olive",
    BATCH: "tab:brown",
    ACTIVATIONS: "tab:blue",
    EXCHANGE: "tab:orange",
    TEMPORARY: "tab:gray",
}


@dataclass(frozen=True)
class Bar:
    """A bar of the plot: bytes of a rank by kind (None: not counted), and the longest sequence that fits."""

    name: str
    kinds: Mapping[str, int] | None
    longest: int


def memory_plot(bars: Sequence[Bar], limit: int, path: str | Path, title: str, caption: str) -> None:
    """Write a PNG with the memory of each setting (left) and its longest sequence (right).

    Args:
        bars: the bars from top to bottom.
        limit: bytes that a rank may use.
        title: title of the left plot.
        caption: text below the plots, for the basis of the numbers.
    """
    text = textwrap.fill(caption, 165)
    inches = 1.8 + 0.42 * len(bars) + 0.16 * (text.count("\n") + 1)
    figure = Figure(figsize=(13, inches), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _memory(left, bars, limit)
    left.set_title(title, fontsize=10)
    left.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    left.invert_yaxis()
    lengths = [bar.longest for bar in bars]
    drawn = right.barh(range(len(bars)), lengths, color="tab:cyan", height=0.7)
    right.bar_label(drawn, [f"{n:,}" if n else "nothing fits" for n in lengths], padding=3, fontsize=8)
    top = 1.3 * (max(lengths, default=0) or 1)
    step = 2 ** max(0, math.ceil(math.log2(top / 6)))
    right.set(xlim=(0, top), xlabel="tokens", xticks=range(0, int(top) + 1, step))
    right.set_title("longest sequence", fontsize=10)
    right.xaxis.set_major_formatter(lambda x, _: short(x))
    figure.legend(loc="outside upper center", ncols=len(KINDS) + 1, fontsize=8, frameon=False)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5)
    figure.savefig(path, dpi=150)


def short(tokens: float) -> str:
    """Format a number of tokens, such as 4M for 4 * 2**20."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return f"{tokens:g}"


def _memory(axes: Axes, bars: Sequence[Bar], limit: int) -> None:
    """Draw stacked bars with their totals; cut off bars far beyond the limit."""
    totals = [0.0] * len(bars)
    for kind in KINDS:
        sizes = [(bar.kinds or {}).get(kind, 0) / GIB for bar in bars]
        if any(sizes):
            axes.barh(range(len(bars)), sizes, left=totals, color=COLOURS[kind], label=kind, height=0.7)
            totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    end = max(1.6 * limit / GIB, 1.05 * min((t for t in totals if t), default=0))
    end = min(end, 1.15 * max([limit / GIB, *totals]))
    for i, total in enumerate(totals):
        if total:
            beyond = total > 0.93 * end
            where = 0.99 * end if beyond else total + 0.01 * end
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85} if beyond else None
            axes.text(where, i, f"{total:,.1f}", va="center", ha="right" if beyond else "left", fontsize=8, bbox=box)
    axes.axvline(limit / GIB, color="tab:red", lw=1.2, label="fits")
    axes.set(xlim=(0, end), xlabel="GiB of a rank")


#: bytes of AdamW's states for each byte of parameters: two numbers in the parameters' dtype
ADAMW = 2.0
#: bytes of 8-bit AdamW's states for each parameter: two 8-bit numbers, each with an fp32 maximum for a block of 256
ADAMW_8BIT = 2 + 2 * 4 / 256
#: bytes of cuBLAS workspaces of two threads (forward and backward), for the listed GPU capabilities and for all others
CUBLAS = {(9, 0): 2 * (32 << 20)}
CUBLAS_ELSEWHERE = 2 * (8 << 20)


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step, on the rank that needs most.

    Attributes:
        kinds: bytes by kind of memory; they add up to `peak`.
        host: bytes of the rank's pinned host memory for block inputs.
        moment: the part of the step with the peak, such as ("backward", 0) for the first block's backward.
        exchange: memory for rows of other ranks.
        states: bytes of the rank's host memory for parameters, gradients and optimizer states.
        carried: bytes of `peak` that a stream carries from chunk to chunk.
    """

    kinds: dict[str, int]
    host: int
    moment: tuple
    exchange: Exchanged = field(default_factory=Exchanged)
    states: int = 0
    carried: int = 0

    @property
    def peak(self) -> int:
        """Bytes that torch's allocator has in use at the peak."""
        return sum(self.kinds.values())


def memory(footprint: Footprint, tokens: int, setup: Setup | None = None, rows: Exchanged | None = None) -> Memory:
    """Return the memory of a rank for a sequence of N tokens.

    Tensors that a second stack saves count as temporary.

    Args:
        footprint: the counted memory of the model with its settings.
        tokens: N, the tokens of all ranks together.
        setup: GPUs and strategy; None: one GPU.
        rows: memory of the exchange; None: compute it.

    Raises:
        ValueError: for an exchange that cannot run this pattern.
    """
    setup = setup or Setup()
    subject = footprint.subject
    rows = rows or of_subject(subject, tokens, setup)
    local = -(-tokens // setup.ranks)
    away = _offloaded_inputs(footprint, footprint.hidden * local)
    calls = [sharded(subject.call, tokens, setup.ranks, rows)]
    if subject.decoder is not None:
        calls.append(sharded(subject.decoder.call, tokens, setup.ranks, rows.decoder or Exchanged()))
    at = functools.partial(_at, footprint, tokens=local, calls=calls, setup=setup, rows=rows, away=away)
    best = max(((at(x), x.part) for x in footprint.moments), key=lambda x: sum(x[0].values()))
    return Memory(best[0], on_host(footprint, local), best[1], rows, states_on_host(footprint, setup))


def on_host(footprint: Footprint, tokens: int) -> int:
    """Return the bytes of offloaded block inputs for L tokens; each stack has its own budget."""
    settings, decoder = footprint.subject.memory, footprint.subject.decoder
    size, inner = footprint.hidden * tokens, footprint.inner * tokens
    of_decoder = offloaded(settings, decoder.depth, inner) * inner if decoder else 0
    return _offloaded_inputs(footprint, size) * size + of_decoder


def _offloaded_inputs(footprint: Footprint, size: int) -> int:
    """Return the number of offloaded block inputs of the first stack."""
    return offloaded(footprint.subject.memory, footprint.subject.depth, size, footprint.first_kept)


def offloaded(settings: MemorySettings, depth: int, size: int, first_kept: int = 0) -> int:
    """Return the number of block inputs, of `size` bytes each, that `memory.offload.Host` offloads. The first
    `first_kept` inputs need no gradient and are not offloaded."""
    groups = -(-depth // settings.every)
    if settings.offload <= 1:
        return max(0, round(settings.offload * groups) - first_kept)
    return min(groups - first_kept, int(settings.offload * GIB) // max(1, size))


def _decoder_away(footprint: Footprint, moment: Moment, tokens: int) -> int:
    """Return the bytes of the second stack's block inputs that are only on the host at a moment: all offloaded inputs
    except the input in use, the input being fetched, and, if all inputs are offloaded, the last one."""
    decoder, settings = footprint.subject.decoder, footprint.subject.memory
    if decoder is None or not (moment.decoding or moment.part in (("between",), ("head",))):
        return 0
    size = footprint.inner * tokens
    sent = offloaded(settings, decoder.depth, size)
    inputs = sent - (sent == -(-decoder.depth // settings.every))  # the last input stays on the GPU: no block follows
    if moment.decoding:
        if moment.phase == "first":  # its backward is done
            return 0
        group, within = divmod(moment.part[2], settings.every)
        if moment.phase == "backward":
            # a group fetches the input of the previous group; a single block does so only if its own was offloaded
            fetched = within == 0 and (settings.every > 1 or group < sent)
            inputs = min(sent, group - fetched)
        else:  # the caller keeps the first input on the GPU
            inputs = min(sent, group) - 1
    return max(0, inputs) * size


def states_on_host(footprint: Footprint, setup: Setup) -> int:
    """Return the bytes of host memory for a rank's parameters, gradients and optimizer states; 0 without cpu_offload.

    Each parameter and each gradient has a pinned buffer, which torch rounds up to a power of two.
    """
    if not setup.cpu_offload:
        return 0
    size = footprint.parameter_size
    part = lambda rows, *dims: size * math.prod((-(-rows // setup.ranks), *dims))  # noqa: E731
    shapes = _shapes(footprint.subject.make, footprint.subject.depth)
    locked = sum(_power_of_two(part(*x)) * (1 + trained) for x, trained in shapes)
    return locked + _states(-(-footprint.trained // setup.ranks), size, setup)


def bytes_moved_at_fit_end(footprint: Footprint, setup: Setup) -> int:
    """Return the bytes of a rank's parameters, gradients and states, which Lightning moves to the host after fit."""
    trained = footprint.trained
    whole = footprint.parameters + trained + _states(trained, footprint.parameter_size, setup)
    return -(-whole // setup.ranks) if setup.strategy == "ring_dilated_fsdp" else whole


@functools.cache
def _shapes(make: Callable[[int], DilatedModule], depth: int) -> list[tuple[torch.Size, bool]]:
    """Return (shape, whether it is trained) of each parameter."""
    return [(p.shape, p.requires_grad) for p in blank(make, depth).parameters()]


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _states(parameters: int, size: int, setup: Setup) -> int:
    """Return the bytes of optimizer states; `parameters`: bytes of all parameters; `size`: bytes of one number."""
    eight = setup.optimizer == "adamw8bit"
    return round(parameters / size * ADAMW_8BIT) if eight else round(parameters * ADAMW)


def _at(
    footprint: Footprint,
    moment: Moment,
    tokens: int,
    calls: list[OpCall],
    setup: Setup,
    rows: Exchanged,
    away: int,
) -> dict[str, int]:
    """Return the bytes by kind at a moment; `away`: number of offloaded block inputs."""
    held, saved = footprint.held(moment, tokens), footprint.saved(moment, tokens)
    if saved and away:
        less = _on_host_only(footprint, moment, away) * footprint.hidden * tokens
        held, saved = held - less, saved - less
    held -= _decoder_away(footprint, moment, tokens)
    kinds = _static(footprint, moment, setup)
    kinds[ACTIVATIONS] = saved
    kinds[EXCHANGE] = _exchange(footprint, moment, rows)
    call = calls[moment.decoding]
    room = footprint.room(moment, call)
    kinds[TEMPORARY] = held - saved + room + CUBLAS.get(call.capability, CUBLAS_ELSEWHERE)
    return {kind: n for kind, n in kinds.items() if n}


def _on_host_only(footprint: Footprint, moment: Moment, away: int) -> int:
    """Return the number of block inputs that are only on the host; `away`: number of offloaded block inputs."""
    first, group = footprint.first_kept, moment.group
    # this group's input is also on the GPU, in the forward until the next copy starts and in the whole backward
    current = first <= group < first + away
    if moment.phase == "backward" and not moment.decoding:  # a group's first block fetches the previous group's input
        another = moment.within == 0 and group > first
    else:  # the caller of the blocks keeps the first block's input until the last block is done
        another = moment.within is not None and not first and moment.part != ("behind", footprint.subject.depth - 1)
    return max(0, min(away, group + 1 - first) - current - another)


def _static(footprint: Footprint, moment: Moment, setup: Setup) -> dict[str, int]:
    """Return the bytes of parameters, gradients and states on a rank."""
    parameters, trained = footprint.parameters, footprint.trained
    gradients = moment.static - parameters
    states = _states(trained, footprint.parameter_size, setup)
    if setup.strategy != "ring_dilated_fsdp":
        averaged = setup.strategy == "ring_dilated" and setup.ranks * setup.data_ranks > 1
        buckets = trained if averaged else 0  # DDP's buckets are copies of the gradients
        return {PARAMETERS: parameters, GRADIENTS: gradients + buckets, OPTIMIZER: states}
    decoder = footprint.subject.decoder
    inner = decoder.parameters * footprint.parameter_size if decoder else 0  # bytes of a block of the second stack
    sizes, trained_sizes = zip(*footprint.blocks, strict=True)
    edge = parameters - sum(sizes) - (decoder.depth * inner if decoder else 0)
    share = lambda n: -(-n // setup.ranks)  # noqa: E731
    # gathered: parameters of this block, of the next one, and outside blocks; unreduced: gradients of two blocks
    widest = max(inner, *sizes)
    gathered = 2 * widest + edge
    block_gradients = max(inner, *trained_sizes)
    unreduced = 2 * block_gradients if moment.phase in ("backward", "first", "after") else 0
    if unreduced:  # gradients of output projection and last norm are unsharded until the end of the backward
        edge_gradients = max(0, footprint.edge_gradients - (decoder.depth * inner if decoder else 0))
        unreduced += edge_gradients if setup.cpu_offload else edge_gradients - share(edge_gradients)
    if setup.cpu_offload:  # in addition, shards of one block are being copied from the host and to the host
        copied = share(block_gradients) if unreduced else 0
        return {PARAMETERS: gathered + share(widest), GRADIENTS: unreduced + copied, OPTIMIZER: 0}
    return {PARAMETERS: share(parameters) + gathered, GRADIENTS: share(gradients) + unreduced, OPTIMIZER: share(states)}


def _exchange(footprint: Footprint, moment: Moment, rows: Exchanged) -> int:
    """Return the bytes of other ranks' rows: rows that layers saved, and rows of the running call."""
    keeps, outside = footprint.subject.memory.policy != "block", moment.part in (("between",), ("head",))
    layers = footprint.layers(moment) if moment.within is not None or moment.decoding or outside else 0
    kept, decoder, inner = 0, footprint.subject.decoder, rows.decoder or Exchanged()
    if moment.decoding or outside:  # all layers of the first stack, and an upper bound for the second stack
        kept = inner.kept * (decoder.depth if decoder and keeps else 1)
    kept += rows.kept_by(layers) if keeps else rows.most("kept") * min(layers, 1)
    running = inner if moment.decoding else rows
    return kept + (running.most(moment.piece.op) if moment.piece.op in ("forward", "backward") else 0)
