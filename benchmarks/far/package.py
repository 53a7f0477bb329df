"""The package's LongNetLM on far tasks: train at short lengths, test at longer ones, chunk by chunk.

    python benchmarks/far/package.py --name hashed_s0 --out rows
    python benchmarks/far/package.py --far dense --test 65536 262144 1048576 --name dense --out rows
    python benchmarks/far/package.py --load rows/hashed_s0.pt --test 1073741824 --name hashed_s0 --out rows   # no training
    # on a core of a CPU, three minutes
    python benchmarks/far/package.py --device cpu --width 64 --keys 512 --per-pair 16 --queries 3 --lengths 64 256 \
        --steps 250 150 --local 16 --tokens 4096 --lr 1e-2 --test 256 4096 65536 --chunk 4096 --least 8192 \
        --name small --out rows

The task is the one of `task.py`, with noise as the haystack, or with `--data` two versions of files (`pairs.py`). One
head of each layer in `--far-layers`, the last, reads far. All other heads have windows. An answer counts as right if
its probability is above one half, so the likeliest token is right at least as often. Appends a line of JSON to
OUT/NAME.jsonl after each tenth of the training and each test.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pairs import Versions, second, spread_out
from task import Stream, Task
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.memory.settings import MemorySettings

FAR = ("hashed", "dense", "rotary", "window")
IGNORE = -100


def options(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--far", choices=FAR, default="hashed", help="dense: without positions; rotary: dense with positions"
    )
    p.add_argument("--data", type=Path, help="a corpus of pairs.py; none: recall of keys")
    p.add_argument("--far-layers", type=int, nargs="+", default=[0])
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--local", type=int, default=512, help="tokens that a window reads")
    p.add_argument("--keys", type=int, default=2048)
    p.add_argument("--per-pair", type=int, default=64, help="tokens of a sequence for each pair")
    p.add_argument("--queries", type=int, default=8, help="how often each key is asked in training")
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    p.add_argument("--steps", type=int, nargs="+", help="of each length; by default 1,000 and 400")
    p.add_argument("--soft-until", type=int, default=4096, help="hashed heads read all rows up to this length")
    p.add_argument("--tokens", type=int, default=65536, help="of a step")
    p.add_argument("--seconds", type=float, help="end the training, its falling learning rate included, by then")
    p.add_argument("--warmup", type=int, default=100, help="steps")
    p.add_argument("--load", type=Path, help="weights of an earlier run; without --steps, they are only tested")
    p.add_argument("--policy", default="none", help="of recomputation")
    p.add_argument("--tile", type=int)
    p.add_argument("--stream", type=int, help="train chunk by chunk, with the exact gradients")
    p.add_argument("--truncate", action="store_true", help="with --stream: gradients stop between chunks")
    p.add_argument("--residual-dtype", choices=["bfloat16"])
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--test", type=int, nargs="+", default=[4096, 65536, 262144, 1048576, 16777216])
    p.add_argument("--chunk", type=int, default=1 << 20, help="tokens that a test computes at a time")
    p.add_argument("--least", type=int, default=1 << 20, help="least number of tokens of a test, in several sequences")
    p.add_argument("--whole", action="store_true", help="test in one pass, without a stream; rows are not counted")
    p.add_argument("--samples", type=int, default=64, help="most held-out samples of a test with --data")
    p.add_argument("--compile", action="store_true", help="compile the blocks in training")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--name", default="run")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args(argv)
    if a.steps is None:
        a.lengths, a.steps = ([], []) if a.load else (a.lengths, [1000, 400])
    if len(a.lengths) != len(a.steps):
        p.error(f"{len(a.lengths)} lengths and {len(a.steps)} steps: give one for each length")
    return a


def model_of(a: argparse.Namespace, vocabulary: int) -> ld.LongNetLM:
    """Make the model that the command line describes."""
    window = ld.DilatedPattern([ld.Window(a.local)])
    pattern, more = [window] * a.depth, {}
    if a.far == "hashed":
        more = {"hashed": {"layers": a.far_layers, "soft_until": a.soft_until}}
    elif a.far != "window":
        heads = range(a.heads)
        branches = ld.Window(a.local, heads=tuple(heads[:-1])), ld.Branch(None, 1, heads=(heads[-1],))
        for layer in a.far_layers:
            pattern[layer] = ld.DilatedPattern(branches)
        more = {"global_rotary": a.far == "rotary"}
    if a.residual_dtype:
        more["residual_dtype"] = a.residual_dtype
    sizes = {"vocab_size": vocabulary, "dim": a.width, "depth": a.depth, "num_heads": a.heads, "kv_conv": 4}
    return ld.LongNetLM(pattern, **sizes, max_seq_len=65536, compile_blocks=a.compile, **more)


def write(a: argparse.Namespace, row: dict[str, Any]) -> None:
    """Append a line to the run's file."""
    line = json.dumps({"name": a.name, **row})
    with (a.out / f"{a.name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def mixed(a: argparse.Namespace) -> torch.autocast:
    return torch.autocast(a.device, torch.bfloat16, enabled=a.device == "cuda")


def hashed_heads(model: ld.LongNetLM) -> list[Any]:
    return [x for block in model.transformer.blocks if (x := block.attention_layer.hashed) is not None]


def train(model: ld.LongNetLM, task: Task | Versions, a: argparse.Namespace) -> None:
    """Train at each length, with warm-up and a falling learning rate, until the steps or `a.seconds` have ended."""
    fused = a.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    gen, total, step = torch.Generator(a.device).manual_seed(1000 + a.seed), sum(a.steps), 0
    began, curve, tenth = time.monotonic(), [], max(1, total // 10)
    for size in [size for size, steps in zip(a.lengths, a.steps, strict=True) for _ in range(steps)]:
        done = max(step / total, (time.monotonic() - began) / (a.seconds or math.inf))
        if done < 1:
            tokens, at, answers, _ = task.draw(size, max(1, a.tokens // size), gen, a.queries)
            labels = torch.full_like(tokens, IGNORE).scatter(1, at, answers)
            with mixed(a):
                loss, _ = model.token_mean({"tokens": tokens, "labels": labels})
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = a.lr * min(1, (step + 1) / a.warmup, (1 - done) / 0.2)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.detach())
            step += 1
        if curve and (step % tenth == 0 or done >= 1):
            bits = torch.stack(curve).mean().item() / math.log(2)
            terms = [x.terms.latest for x in hashed_heads(model)]
            codes = [[round(x, 3) for x in (t[:3] / t[3]).tolist()] for t in terms]
            row = {"step": step, "length": size, "bits": round(bits, 4), "codes": codes}
            write(a, {**row, "seconds": round(time.monotonic() - began, 1), "GiB": peak(a)})
            curve.clear()


class Part(NamedTuple):
    """Consecutive tokens of a stream, all (1, n)."""

    tokens: Tensor
    labels: Tensor
    counted: Tensor  # bool: queries for which the rows that they read are counted


class Answers(NamedTuple):
    """The answers of a stream."""

    nats: Tensor  # of all labels
    rows: Tensor  # (2,), rows that counted queries read, and the number of these queries, summed over far layers
    state: dict[str, int]  # size of the state after the last token


@torch.no_grad()
def read(model: ld.LongNetLM, parts: Iterable[Part], a: argparse.Namespace) -> Answers:
    """Read a stream part by part."""
    state, nats, rows = None, [], torch.zeros(2, dtype=torch.float64, device=a.device)
    heads = [] if a.whole else hashed_heads(model)
    for head in heads:
        head.train()  # only then do hashed heads count rows; an endless sequence is never read in the soft way
    for part in parts:
        for head in heads:
            head.terms.labelled = part.counted
        with mixed(a):
            if a.whole:
                losses = model.token_losses({"tokens": part.tokens, "labels": part.labels})
            else:
                size = part.tokens.shape[1]
                losses, state = model.stream(part.tokens, part.labels, state, chunk=size, per_token=True)
        nats.append(losses[part.labels != IGNORE])
        for head in heads:
            rows += head.terms.latest[2:]
    for head in heads:
        head.eval()
        head.terms.labelled = None
    memories = () if state is None else state.memories.values()
    size = {} if state is None else {"rows kept": sum(len(x.keys) for x in memories), "state bytes": state.nbytes}
    return Answers(torch.cat(nats).float(), rows, size)


def recall_parts(stream: Stream, a: argparse.Namespace) -> Iterator[Part]:
    """Yield the chunks of a stream of keys; print the time at each tenth of many chunks."""
    began, chunks = time.monotonic(), stream.size // stream.chunk
    for i in range(chunks):
        tokens, (at, answers) = stream.read(i * stream.chunk), stream.asked_in(i * stream.chunk)
        labels = torch.full_like(tokens, IGNORE)
        labels[0, at] = answers
        yield Part(tokens, labels, labels != IGNORE)
        if chunks >= 100 and (i + 1) % (chunks // 10) == 0:
            seconds = round(time.monotonic() - began, 1)
            print(json.dumps({"name": a.name, "read": (i + 1) * stream.chunk, "seconds": seconds}), flush=True)


def version_parts(sample: Tensor, chunk: int) -> Iterator[Part]:
    """Yield the chunks of a sample (1, N) of two versions. Rows count in the second half, as its bits do."""
    labels = torch.nn.functional.pad(sample[:, 1:], (0, 1), value=IGNORE)
    counted = torch.arange(sample.shape[1], device=sample.device)[None] >= second(sample.shape[1])
    yield from map(Part, *(x.split(chunk, 1) for x in (sample, labels, counted)))


def test_recall(model: ld.LongNetLM, task: Task, size: int, a: argparse.Namespace) -> dict[str, Any]:
    """Return the share of right answers in new sequences of this length."""
    streams = [
        Stream(task, size, size if a.whole else min(size, a.chunk), 7 + i) for i in range(max(1, a.least // size))
    ]
    each = [read(model, recall_parts(stream, a), a) for stream in streams]
    nats = torch.cat([x.nats for x in each])
    right = round((nats < math.log(2)).double().mean().item() * 100, 2)
    bits = round(nats.mean().item() / math.log(2), 4)
    return {"right": right, "asked": len(nats), "bits": bits, **rows_of(each), **each[-1].state}


def test_versions(model: ld.LongNetLM, task: Versions, size: int, a: argparse.Namespace) -> dict[str, Any]:
    """Return bits per byte of both halves of held-out samples, and the standard error of the second half."""
    places = spread_out(task.held.walk(size), a.samples)
    samples = (task.held.samples(place[None], size) for place in places)
    each = [read(model, version_parts(sample, size if a.whole else min(size, a.chunk)), a) for sample in samples]
    bits = torch.stack([x.nats.double() for x in each]) / math.log(2)
    late = bits[:, second(size) :].mean(1)
    eighths = [round(x.mean().item(), 3) for x in bits.tensor_split(8, 1)]
    halves = {"first": bits[:, : size // 2 - size // 16].mean(), "second": late.mean()}
    halves["error"] = late.std() / len(late) ** 0.5
    halves = {k: round(x.item(), 4) for k, x in halves.items()}
    return {"samples": len(each), **halves, "eighths": eighths, **rows_of(each), **each[-1].state}


def rows_of(each: list[Answers]) -> dict[str, float]:
    rows, queries = sum(x.rows for x in each).tolist()
    return {"rows": round(rows / queries, 2)} if queries else {}


def peak(a: argparse.Namespace) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if a.device == "cuda" else None


def main(argv: list[str] | None = None) -> None:
    a = options(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    task = Versions(a.data, a.device) if a.data else Task("noise", a.keys, a.per_pair, device=a.device)
    model = model_of(a, task.vocabulary)
    model.configure_model()
    if a.load:
        model.load_state_dict(torch.load(a.load, map_location="cpu", weights_only=True)["weights"])
    model.to(a.device).train()
    model.transformer.memory = MemorySettings(a.policy, tile=a.tile, stream=a.stream, truncate=a.truncate)
    args = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    write(a, {"options": args, "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters())})
    if a.steps:
        train(model, task, a)
        torch.save({"options": args, "weights": model.state_dict()}, a.out / f"{a.name}.pt")
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # a test has few calls of each shape
        for size in a.test:
            began = time.monotonic()
            if a.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            row = (test_versions if a.data else test_recall)(model, task, size, a)
            write(a, {"test": size, **row, "GiB": peak(a), "seconds": round(time.monotonic() - began, 1)})


if __name__ == "__main__":
    main()
