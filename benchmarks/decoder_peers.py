"""Time a step of transformers' Llama-shaped decoder with torch's context parallel and FSDP, on the GPUs of one host.

    torchrun --nproc-per-node 4 benchmarks/decoder_peers.py --size 1.3B --tokens 65536
    torchrun --nproc-per-node 2 benchmarks/decoder_peers.py --size tiny --tokens 256 --cpu     # attends to own tokens only

The peer of `weak_scaling.py --decoder SIZE --recompute block --strategy ring_dilated_fsdp`: random weights of the
same sizes, dense causal attention, all weights trained, layers recomputed, tiles of `TILE` tokens in the loss,
bf16, fused AdamW.
Each layer is a unit of FSDP. Layers are called without transformers' masks, because they would take N^2 memory.
Prints one row: the median step of the slowest rank, and the largest peak.
Shape letters: N tokens, L = N / R tokens of a rank, R ranks, D width of the decoder.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder_step import GIB, SIZES, TILE, of_transformers
from exchange import launched, meet, most
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", choices=SIZES, default="1.3B")
    p.add_argument("--tokens", type=int, default=65536, help="of a rank")
    p.add_argument(
        "--rotate", default="alltoall", choices=["alltoall", "allgather"], help="torch's; alltoall is its ring"
    )
    p.add_argument("--steps", type=int, default=1, help="measured")
    p.add_argument("--warm", type=int, default=1, help="steps before those")
    p.add_argument("--cpu", action="store_true", help="gloo ranks, without torch's context parallel")
    return p.parse_args()


class Decoder(torch.nn.Module):
    """The decoder of transformers with its loss. `forward` returns the sum of the nats of this rank's L tokens."""

    def __init__(self, args: argparse.Namespace, whole: int) -> None:
        super().__init__()
        names = argparse.Namespace(size=args.size, seq_len=[whole], lora=None)
        self.decoder = of_transformers(names)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        base = self.decoder.model
        x = base.embed_tokens(tokens)
        angles = base.rotary_emb(x, positions)
        for layer in base.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
        x = base.norm(x)[0]
        nats = lambda h, y: F.cross_entropy(self.decoder.lm_head(h).float(), y, reduction="sum")  # noqa: E731
        parts = zip(x.split(TILE), labels[0].split(TILE), strict=True)
        return torch.stack([checkpoint(nats, h, y, use_reentrant=False) for h, y in parts]).sum()


def sharded(args: argparse.Namespace, whole: int, mesh: DeviceMesh, device: torch.device) -> Decoder:
    """Build the decoder, draw its weights on the device, and shard them over all ranks."""
    with device:
        model = Decoder(args, whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.decoder.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy).train()


def measure(args: argparse.Namespace, device: torch.device) -> tuple[float, float, float]:
    """Return (seconds of a step, GiB, loss), each of the rank with most, the loss as the mean over all tokens."""
    ranks = dist.get_world_size()
    whole = args.tokens * ranks
    mesh = init_device_mesh(device.type, (ranks,))
    model = sharded(args, whole, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not args.cpu)
    times, loss = [], torch.zeros((), device=device)
    if not args.cpu:
        torch.cuda.reset_peak_memory_stats()  # the whole decoder was on the device
    for step in range(args.warm + args.steps):
        generator = torch.Generator(device).manual_seed(step)  # the same tokens on all ranks
        ids = torch.randint(0, SIZES[args.size]["vocab_size"], (1, whole + 1), device=device, generator=generator)
        batch = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(whole, device=device)[None].clone()]
        meet(device)
        begin = time.perf_counter()
        with shards(args, mesh, batch) as own, kernels(args):
            loss = model(*own) * ranks / whole  # FSDP takes the mean over ranks
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if not args.cpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    total = loss.detach() / ranks
    dist.all_reduce(total)
    peak = float("nan") if args.cpu else torch.cuda.max_memory_allocated() / GIB
    took, peak = most(device, statistics.median(times[args.warm :]), peak)
    return took, peak, float(total)


@contextlib.contextmanager
def shards(args: argparse.Namespace, mesh: DeviceMesh, batch: list[Tensor]):  # type: ignore[no-untyped-def]
    """Yield this rank's part of each (1, N) tensor: with torch's context parallel an early and a late part."""
    if args.cpu:
        yield [x.chunk(mesh.size(), 1)[mesh.get_rank()] for x in batch]
        return
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(args.rotate)
    with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1] * len(batch), no_restore_buffers=set(batch)):
        yield batch


def kernels(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Return the context of torch's attention kernel."""
    return contextlib.nullcontext() if args.cpu else sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def main() -> None:
    args = options()
    device = launched(args.cpu)
    torch.manual_seed(0)
    took, peak, loss = measure(args, device)
    if dist.get_rank() == 0:
        print(
            "| GPUs | tokens of each | decoder | way | ms | thousand tokens/s of all | peak GiB | loss |\n"
            + "|---" * 8
            + "|"
        )
        way = "own tokens only" if args.cpu else f"torch's context parallel, {args.rotate}"
        print(
            f"| {dist.get_world_size()} | {args.tokens:,} | {args.size}, dense | {way} | {took * 1000:.1f} "
            f"| {dist.get_world_size() * args.tokens / took / 1000:.1f} | {peak:.1f} | {loss:.4f} |"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
