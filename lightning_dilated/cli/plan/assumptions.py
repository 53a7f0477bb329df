"""What the numbers of a plan rest on, in words."""

from __future__ import annotations

from lightning_dilated.cli.plan.request import Asked
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.longvit.model import LongViT
from lightning_dilated.models.pattern_warnings import advice
from lightning_dilated.models.slides.mae import SlidePretrainer
from lightning_dilated.planning.counting.exchange_memory import lighter
from lightning_dilated.planning.estimate import HOST_LINK, HOST_MEMORY, measured_machine
from lightning_dilated.planning.gpus import CONTEXT, MARGIN, NCCL
from lightning_dilated.planning.memory import GIB
from lightning_dilated.planning.search import Case


def assumptions(asked: Asked, case: Case) -> list[str]:
    """What the numbers rest on."""
    base, setup = measured_machine(), case.setup
    own = asked.gpu.name == "H200" and (case.facts.dim, case.facts.depth) == (base.dim, base.depth)
    notes = [
        "memory: the model's own step is run under fake tensors for two depths and two lengths, and what it holds is "
        "counted; the op's room follows from its own stretches. Compiled blocks keep what Inductor's partitioner says; its "
        "kernels are modelled.",
        f"{CONTEXT / GIB:.1f} GiB are left for CUDA ({NCCL / GIB:.1f} more for NCCL with several GPUs) and {MARGIN:.0%}, 1 "
        "GiB at least, for fragments; lengths that nearly fill the GPU need PYTORCH_ALLOC_CONF=expandable_segments:True, "
        "which the command line sets.",
        f"time: {'measured parts' if own else 'scaled, an estimate,'} of {base.name} ({base.dim} x {base.depth}, compiled): "
        "products by FLOPs, norms and sums by width, attention by pairs times head dim, another GPU by its bf16 FLOP/s.",
    ]
    notes += _counted(asked.model)
    if not case.facts.whole:
        notes.append(
            "weights that stay as they are have neither gradients nor states; low-rank updates are added to what their "
            "layers give by passes over it, at the speed of the GPU's memory: reckoned, not measured."
        )
    if setup.ranks > 1:
        sums = f" Gradients are summed {setup.bucket_cap_mb} MiB at a time beside the backward; its slowing is not planned."
        sums = sums if setup.bucket_cap_mb is not None else ""
        notes.append(f"all {setup.ranks:,} GPUs share every sequence; links: {setup.links}.{sums}")
    if asked.tokens and (found := advice(asked.model, asked.tokens)):
        notes.append(f"what the pattern cannot do, whatever the GPUs: {found}")
    if lighter(case.subject.call, setup.ranks) != case.subject.call:
        notes.append("exchanges of so many ranks are counted for fewer and wider heads, of as many bytes and FLOPs.")
    if setup.strategy == "ring_dilated_fsdp":
        notes.append(
            "sharded parameters: two blocks are whole at a time, gathered twice a step beside other blocks' work."
        )
    if asked.batch > 1:
        notes.append(
            f"one sequence is planned, and the recipe's batches hold {asked.batch} on each data rank: for their memory give "
            f"--tokens {asked.batch} times as many, or set data.init_args.batch_size: 1."
        )
    if setup.cpu_offload:
        notes.append(
            "cpu_offload: parameters and gradients in pinned buffers, each rounded up to a power of two; three copies of a "
            f"rank's part a step at {HOST_LINK / 1e9:.0f} GB/s; AdamW(fused=True) on the host is an assumption: a node's "
            f"memory gives it {HOST_MEMORY / 1e9:.0f} GB/s. As training begins each rank has the whole model on the host."
        )
    if asked.host:
        notes.append(
            f"host memory: {asked.host:.0f} GiB a rank, {HOST_LINK / 1e9:.0f} GB/s each way, beside the computation."
        )
    if not case.subject.compile_blocks:
        notes.append("time is that of compiled blocks, and of their model's loss; uncompiled ones take longer.")
    return notes


def _counted(model: DilatedModule) -> list[str]:
    """What a count of the model takes for granted."""
    if isinstance(model, SlidePretrainer):
        return [
            f"as many tiles are hidden as in the mean, mask_ratio={model.hiding.p:g}; what the decoder's blocks keep is "
            "told as temporary."
        ]
    if isinstance(model, LongViT):
        cells = model.image_size // model.patch_size
        return [
            f"images come as patches and grid; positions are interpolated from the table of {cells} x {cells} patches, as "
            "they are for images of another size."
        ]
    return []
