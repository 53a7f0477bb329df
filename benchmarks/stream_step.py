"""Time one exact training step over a sequence in chunks: tokens per second and memory, measured and by `plan`.

    python benchmarks/stream_step.py --tokens 67108864                       # 125M parameters, chunks of 1M
    python benchmarks/stream_step.py --tokens 1000000000 --dim 384 --depth 6 --heads 6 \
        --policy attention-kept --steps 1 --warm 2097152
    python benchmarks/stream_step.py --tokens 4194304 --hybrid 12
    python benchmarks/stream_step.py --tokens 4194304 --dim 4096 --depth 32 --heads 32 --kv-heads 8 --ffn-dim 14336 \
        --policy block --tile 8192 --chunk 131072 --precision bf16-true --eightbit
    python benchmarks/stream_step.py --tokens 262144 --dim 384 --depth 8 --heads 6 --chunk 32768 --steps 100 --lr 1e-3 \
        --text bytes.bin --losses streamed.json                              # and with --chunk 0: one pass
    torchrun --nproc-per-node 2 benchmarks/stream_step.py --tokens 67108864 --chunk 2097152     # ranks share every chunk

The text is random bytes, generated on the host as uint8 and widened chunk by chunk, or consecutive parts of a file.
AdamW. The last step is timed. The first step, or a step of `--warm` tokens with an equally long last chunk, compiles.
Prints one row of a table. The pattern is geometric(2048, N) or a hybrid. Under torchrun, ranks share each chunk
(layout="chunked"), and the row has the bytes that a rank receives on average, and the plan's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.ext.planning.candidates import in_words
from lightning_dilated.ext.planning.counting.model_specs import Facts, counted_model_of
from lightning_dilated.ext.planning.estimate import Case
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.memory import GIB
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.streams.training import streamed_sum
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.sequence import SequenceGroup

#: columns of the table
HEAD = ("model", "tokens", "settings", "pattern", "planned GiB", "measured", "off", "planned s", "measured", "off")
HEAD += ("tokens/s", "nats a token")
#: more columns if ranks share chunks
SHARED = ("GPUs", "MB received", "planned")
RANKS = int(os.environ.get("WORLD_SIZE", 1))


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=4194304)
    p.add_argument("--chunk", type=int, default=1048576, help="0: one pass")
    for name, value in (("dim", 768), ("depth", 12), ("heads", 12)):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--kv-heads", type=int)
    p.add_argument("--ffn-dim", type=int)
    p.add_argument("--hybrid", type=int, help="N: a dense head in every N-th layer, and local segments")
    p.add_argument("--policy", default="attention-kept")
    p.add_argument("--tile", type=int)
    p.add_argument("--every", type=int, default=1)
    p.add_argument("--offload", type=float, default=0.0)
    p.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true"])
    p.add_argument("--eightbit", action="store_true", help="torchao's AdamW8bit")
    p.add_argument("--linear-dtype", choices=["float8"], help="of products of linear layers, by torchao")
    p.add_argument("--steps", type=int, default=2)
    p.add_argument("--warm", type=int, help="tokens of whole chunks of a step before these, which compiles")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--text", type=Path, help="bytes to learn")
    p.add_argument("--losses", type=Path, help="where the loss of each step is written, as JSON")
    p.add_argument("--gpu", default="H200", help="that `plan` is asked for")
    p.add_argument("--profile", action="store_true", help="kernels and host of two chunks of each pass, on stderr")
    return p.parse_args()


def model_of(a: argparse.Namespace) -> ld.LongNetLM:
    """Return the model before it is built."""
    widest = max(2048, 1 << (a.tokens - 1).bit_length())
    pattern = ld.DilatedPattern.geometric(2048, widest)
    if a.hybrid:
        pattern = ld.DilatedPattern.hybrid(a.depth, a.heads, a.kv_heads, global_every=a.hybrid)
    sizes = {"dim": a.dim, "depth": a.depth, "num_heads": a.heads, "num_kv_heads": a.kv_heads, "ffn_dim": a.ffn_dim}
    sizes["linear_dtype"] = a.linear_dtype
    return ld.LongNetLM(pattern, 256, max_seq_len=a.tokens, residual_dtype="bfloat16", compile_blocks=True, **sizes)


def planned(a: argparse.Namespace, settings: MemorySettings) -> tuple[float, float, float]:
    """Return (GiB, seconds, bytes that a rank receives) of a step by `plan`."""
    model, gpu = model_of(a), find_gpu(a.gpu)
    subject = counted_model_of(model, a.precision, None, True, gpu.capability)
    optimizer = "adamw8bit" if a.eightbit else "adamw"
    setup = Setup("ring_dilated" if RANKS > 1 else "single", RANKS, optimizer=optimizer)
    case = Case(subject, Facts.of(model, subject), setup, gpu, host=128)
    time = case.time(settings, a.tokens)
    exchanged = 0.0 if time.exchange is None else time.exchange.forward + time.exchange.backward
    return case.memory(settings, a.tokens).peak / GIB, time.seconds, exchanged


def optimizer_of(a: argparse.Namespace, model: ld.LongNetLM) -> torch.optim.Optimizer:
    """Return AdamW: fused on a GPU, or with 8-bit states."""
    if a.eightbit:
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), lr=a.lr)
    return torch.optim.AdamW(model.parameters(), lr=a.lr, fused=True)


class Bytes:
    """Holds uint8 tokens. Slices are int64, as batches need."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.ndim, self.device = values, values.shape, values.ndim, values.device

    def __getitem__(self, at: object) -> Tensor:
        return self.values[at].long()


def texts(a: argparse.Namespace) -> Iterator[Tensor]:
    """Yield uint8 tokens (1, N + 1) for each step."""
    if a.warm:
        warm = a.warm + (a.tokens % a.chunk if a.chunk else 0)
        yield torch.randint(0, 256, (1, warm + 1), dtype=torch.uint8)
    if a.text:
        file = np.memmap(a.text, np.uint8, mode="r")
        for i in range(a.steps):
            at = i * a.tokens % (len(file) - a.tokens)
            yield torch.from_numpy(np.array(file[at : at + a.tokens + 1]))[None]
    else:
        text = torch.randint(0, 256, (1, a.tokens + 1), dtype=torch.uint8)
        yield from itertools.repeat(text, a.steps)


def step(model: ld.LongNetLM, text: Tensor, group: SequenceGroup | None) -> Tensor:
    """Return the sum of this rank's nats, with gradients."""
    if not model.transformer.memory.stream:
        text = text.to(model.head.weight.device).long()
        return model.loss_terms({"tokens": text[:, :-1], "labels": text[:, 1:]})[0]
    own = [text[:, :-1], text[:, 1:]]
    if group is not None:
        ranges = group.place.ranges(own[0].shape[1])
        own = [torch.cat([x[:, r.start : r.stop] for r in ranges], 1) for x in own]
    batch = {"tokens": Bytes(own[0]), "labels": Bytes(own[1])}
    run = lambda i, layers: model._losses(*model.streaming.chunk(model, batch, i, layers), summed=True)  # noqa: E731
    return streamed_sum(model.transformer.stream, run, model.streaming.chunks(model, batch), [model], model.head.weight)


def main() -> None:
    a = options()
    settings = MemorySettings(a.policy, a.every, a.offload, tile=a.tile, stream=a.chunk or None)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    group, active = None, contextlib.nullcontext()
    if RANKS > 1:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        group = SequenceGroup(layout="chunked", stream=a.chunk)
        active = group.active()
    gib, seconds, exchanged = planned(a, settings)
    torch.set_default_dtype(torch.bfloat16 if a.precision == "bf16-true" else torch.float32)
    torch.manual_seed(a.seed)
    model = model_of(a)
    with torch.device(device):
        model.configure_model()
    torch.set_default_dtype(torch.float32)
    model.to(device).transformer.memory = settings
    model.transformer.stream.watch = Profile() if a.profile else _report
    optimizer = optimizer_of(a, model)
    losses = []
    with active, group.trusting() if group is not None else contextlib.nullcontext():
        for text in texts(a):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            received = _received(group)
            begin = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=a.precision == "bf16-mixed"):
                loss = step(model, text, group) / a.tokens
            optimizer.zero_grad()  # as in the Trainer, gradients of the previous step exist until here
            loss.backward()
            if group is not None:
                group.settle()
                for x in (loss.detach(), *(p.grad for p in model.parameters())):
                    dist.all_reduce(x)
            optimizer.step()
            losses.append(float(loss.detach()))
            took = time.perf_counter() - begin
    if a.losses:
        a.losses.write_text(json.dumps(losses))
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else float("nan")
    pattern = f"a dense head in one layer of {a.hybrid}" if a.hybrid else "geometric"
    cells = [f"{a.depth} x {a.dim}", f"{a.tokens:,}", in_words(settings), pattern, f"{gib:.1f}", f"{peak:.1f}"]
    cells += [
        f"{100 * (gib / peak - 1):+.1f} %",
        f"{seconds:.1f}",
        f"{took:.1f}",
        f"{100 * (seconds / took - 1):+.1f} %",
    ]
    cells += [f"{a.tokens / took / 1000:.1f}K", f"{losses[-1]:.4f}"]
    if group is not None:
        mean = torch.tensor((_received(group) - received) / RANKS, device=device)
        dist.all_reduce(mean)
        cells += [str(RANKS), f"{float(mean) / 1e6:,.1f}", f"{exchanged / 1e6:,.1f}"]
    if group is None or group.rank == 0:
        head = HEAD if group is None else HEAD + SHARED
        print(f"| {' | '.join(head)} |\n| {' | '.join(cells)} |", flush=True)


def _report(name: str, done: int, chunks: int) -> None:
    """Print the progress of a pass to stderr at intervals."""
    if done % max(1, chunks // 20) == 0:
        print(f"{time.strftime('%H:%M:%S')} {name} {done}/{chunks}", file=sys.stderr, flush=True)


class Profile:
    """Prints the work of kernels and host in two chunks of each pass, one at the beginning and one in the middle."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._begin = 0.0

    def __call__(self, name: str, done: int, chunks: int) -> None:
        _report(name, done, chunks)
        if self._running is not None:
            torch.cuda.synchronize()
            milliseconds = 1e3 * (time.perf_counter() - self._begin)
            self._running.stop()
            events, self._running = self._running.key_averages(), None
            kernels = sum(x.self_device_time_total for x in events) / 1e3
            print(f"{name} {done}: {milliseconds:.0f} ms, kernels {kernels:.0f} ms", file=sys.stderr)
            for key in ("self_device_time_total", "self_cpu_time_total"):
                print(events.table(sort_by=key, row_limit=15, max_name_column_width=60), file=sys.stderr, flush=True)
        elif done in (3, chunks // 2) and chunks > 8:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._running, self._begin = torch.profiler.profile(activities=activities), time.perf_counter()
            self._running.start()


def _received(group: SequenceGroup | None) -> int:
    """Return the number of bytes that this rank has received."""
    return 0 if group is None else group.forward_traffic.received + group.backward_traffic.received


if __name__ == "__main__":
    main()
