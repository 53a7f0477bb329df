"""Time training steps on short sequences: text, and slides from features on the device to the optimizer step (ms).

    python benchmarks/short_sequences.py                          # GigaPath's encoder (12 x 768) and a 125M language model
    python benchmarks/short_sequences.py --tiles 2000 --tokens --ways plain graphs
    python benchmarks/short_sequences.py --hybrid                 # one dense head in one layer of 4 of the language model
    python benchmarks/short_sequences.py --torchscale path/to/torchscale      # and the encoder with torchscale's op
    python benchmarks/short_sequences.py --host                   # the host's part of a step, on a CPU: replays do nothing

Ways: plain, compiled (blocks by torch.compile), graphs (`cuda_graphs=True`), both. bf16 autocast, fused AdamW. A time
is a mean of ten steps: the smallest of sixty such means after a warm-up, and in brackets their median. `through fit`
times `Trainer.fit` in the same way, with strategy ring_dilated and with auto, in alternation; batches wait in pinned
memory. Prints rows of a table, and at the end the time of a step's kernels by the profiler, which would slow down later
steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from peers import Torchscale
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated.ext.graphs import cuda_graphs
from lightning_dilated.ext.graphs.cuda_graphs import CudaGraphs, Inputs, Recorded

#: names of strategies in Lightning: this package's, and Lightning's own for one device
STRATEGIES = "ring_dilated", "auto"
FIVE = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
WAYS = {
    "plain": {},
    "compiled": {"compile_blocks": True},
    "graphs": {"cuda_graphs": True},
    "both": {"compile_blocks": True, "cuda_graphs": True},
}


def slide(tiles: int) -> dict[str, Any]:
    """Return a slide of random features, with the blank row in front."""
    features, coords, cells = torch.zeros(1, tiles + 1, 1536), torch.full((1, tiles + 1, 2), -1), torch.arange(tiles)
    features[:, 1:].normal_()
    coords[0, 1:] = 256 * torch.stack([cells % 500, cells // 500], 1)
    return {"features": features, "coords": coords, "lengths": torch.tensor([tiles + 1]), "label": torch.tensor([1])}


def text(tokens: int) -> dict[str, Any]:
    values = torch.randint(0, 256, (1, tokens))
    return {"tokens": values, "labels": values.roll(-1, 1)}


def encoder(torchscale: str | None = None, **options: Any) -> ld.SlideEncoder:
    """Build an encoder of GigaPath's sizes and pattern. With a `torchscale` checkout, blocks use torchscale's op."""
    model = ld.SlideEncoder(task="classification", num_classes=2, dropout=0.0, drop_path=0.0, **options)
    model.configure_model()
    for block in model.transformer.blocks if torchscale else ():
        layer = block.attention
        causal, pattern = layer.attention.causal, layer.attention.pattern
        layer.attention = Torchscale(torchscale, pattern, layer.num_heads, layer.head_dim)
        layer.attention.causal = causal
    return model


def language(hybrid: bool = False, **options: Any) -> ld.LongNetLM:
    """Build a model of 125M parameters: five branches, or one dense head in one of 4 layers, and local segments."""
    pattern = ld.DilatedPattern.hybrid(12, 12) if hybrid else ld.DilatedPattern.longnet(*FIVE)
    model = ld.LongNetLM(pattern, 256, 768, 12, 12, max_seq_len=8192, residual_dtype="bfloat16", **options)
    model.configure_model()
    return model


def cases(a: argparse.Namespace) -> Iterator[tuple[str, str, Callable[..., pl.LightningModule], list[dict[str, Any]]]]:
    """Yield (name, way, function that builds the model, batches) for the rows."""
    slides, texts = [slide(n) for n in a.tiles], [text(n) for n in a.tokens]
    for way in a.ways:
        yield "encoder", way, encoder, slides
        yield "language, hybrid" if a.hybrid else "language", way, partial(language, a.hybrid), texts
    if a.torchscale:
        yield "encoder, torchscale's op", "plain", partial(encoder, a.torchscale), slides


def step(model: pl.LightningModule, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> None:
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        total, count = model.loss_terms(batch)
    (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()


def shown(means: Sequence[float]) -> str:
    """Format the smallest and the median of the series."""
    return f"{min(means):.2f} ({statistics.median(means):.2f})"


def wait() -> None:
    """Wait for the GPU, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], None], series: int = 20) -> list[float]:
    """Return milliseconds per step, by series."""
    means = []
    for _ in range(series + 2):
        wait()
        begin = time.perf_counter()
        for _ in range(10):
            run()
        wait()
        means.append((time.perf_counter() - begin) * 100)
    return means[2:]


def kernels(run: Callable[[], None]) -> tuple[float, int]:
    """Return (milliseconds of the kernels of a step, number of kernels)."""
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.self_device_time_total for e in events) / 1000, len(events)


class Clock(pl.Callback):
    """Records when each tenth step ends, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, out: Any, batch: Any, idx: int
    ) -> None:
        """Wait for the GPU, then read the clock."""
        if idx % 10 == 9:
            wait()
            self.times.append(time.perf_counter())


def fitted(model: pl.LightningModule, batch: Mapping[str, Any], strategy: str, steps: int = 220) -> list[float]:
    """Return milliseconds per step in `Trainer.fit`, by series."""
    clock, on_gpu = Clock(), torch.cuda.is_available()
    trainer = pl.Trainer(
        strategy=strategy, devices=1, accelerator="gpu" if on_gpu else "cpu", precision="bf16-mixed", max_steps=steps,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    waiting = {name: x.pin_memory() for name, x in batch.items()} if on_gpu else dict(batch)
    trainer.fit(model, DataLoader([waiting] * steps, batch_size=None))
    model.to("cuda" if on_gpu else "cpu")  # Lightning leaves the model on the host
    return [(end - begin) * 100 for begin, end in itertools.pairwise(clock.times[1:])]


def idle(compute: Any, inputs: Inputs, parameters: Sequence[torch.Tensor], shared: Any) -> Recorded:
    """Return a record in which replays do nothing."""
    x = inputs.x
    zeros = [torch.zeros_like(x) for _ in range(3)]
    return Recorded(inputs, *zeros, (True,) * len(parameters), lambda: None, lambda: None)


def host() -> None:
    """Print the host's time for a step of a narrow encoder with idle replays, alone and in `Trainer.fit`."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # Lightning would use more threads for strategies with several processes
    why_not = CudaGraphs.why_not
    able = lambda *call: None if (why := why_not(*call)) == "it runs on cpu" else why  # noqa: E731
    with mock.patch.object(cuda_graphs, "record", idle), mock.patch.object(CudaGraphs, "why_not", able):
        model = encoder(
            dim=32, num_heads=4, cuda_graphs=True, optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True)
        )
        optimizer = model.train().configure_optimizers()
        batch = slide(50)
        checked = model.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        series = timed(partial(step, model, optimizer, checked), 60)
        through = {name: fitted(model, batch, name, 620) for name in STRATEGIES}
    print(f"a step: {shown(series)} ms")
    for name, means in through.items():
        print(f"through Trainer.fit, strategy {name}: {shown(means)} ms")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiles", type=int, nargs="*", default=[500, 2000, 10000])
    p.add_argument("--tokens", type=int, nargs="*", default=[8192])
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    p.add_argument("--hybrid", action="store_true", help="text with one dense head in one layer of 4")
    p.add_argument("--torchscale", help="folder of a checkout: the encoder with torchscale's op, plain, too")
    p.add_argument("--fit", action="store_true", help="through Trainer.fit, too")
    p.add_argument("--host", action="store_true", help="only the host's part, on a CPU")
    a = p.parse_args()
    torch.manual_seed(0)
    if a.host:
        return host()
    through = " | ms through fit | strategy auto" if a.fit else ""
    print(f"| model | tokens | way | tokens/s | ms a step{through} |")
    runs: dict[str, Callable[[], None]] = {}
    for name, way, make, batches in cases(a):
        model = make(**WAYS[way], optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True))
        model.cuda().train()
        optimizer = model.configure_optimizers()
        for batch in batches:
            on_gpu = model.transfer_batch_to_device(batch, torch.device("cuda"), 0)  # labels are checked before this
            run = partial(step, model, optimizer, on_gpu)
            times: dict[str, list[float]] = {"": [], **{strategy: [] for strategy in STRATEGIES if a.fit}}
            for _ in range(3):
                for strategy, means in times.items():
                    means += fitted(model, batch, strategy) if strategy else timed(run)
            tokens = next(iter(batch.values())).shape[1]
            row = f"| {name} | {tokens:,} | {way} |"
            print(f"{row} {tokens / min(times['']):.1f}K | {' | '.join(map(shown, times.values()))} |", flush=True)
            runs[row] = run
    print("| model | tokens | way | kernels' ms | kernels |")
    for row, run in runs.items():
        busy, number = kernels(run)
        print(f"{row} {busy:.2f} | {number} |", flush=True)


if __name__ == "__main__":
    main()
