"""Recall by length of the package's LongNetLM: train at short lengths, test at longer ones, chunk by chunk.

    python benchmarks/far/package.py --compile --name hashed_s0 --out rows
    python benchmarks/far/package.py --compile --far dense --test 65536 262144 1048576 --name dense --out rows
    # on a core of a CPU, three minutes
    python benchmarks/far/package.py --device cpu --width 64 --keys 512 --per-pair 16 --queries 3 --lengths 64 256 \
        --steps 250 150 --local 16 --tokens 4096 --lr 1e-2 --test 256 4096 65536 --chunk 4096 --least 8192 \
        --name small --out rows

The task is the one of `task.py`, with noise as the haystack. One head of layer 0 is the far head; all other heads have
windows. An answer counts as right if its probability is above one half, so the likeliest token is right at least as
often. Appends a line of JSON to OUT/NAME.jsonl after each tenth of the training and each test.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from task import Stream, Task
from torch import Tensor

import lightning_dilated as ld

FAR = ("hashed", "dense", "rotary", "window")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--far", choices=FAR, default="hashed", help="dense: without positions; rotary: dense with positions"
    )
    p.add_argument("--far-layer", type=int, default=0)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--local", type=int, default=512, help="tokens that a window reads")
    p.add_argument("--keys", type=int, default=2048)
    p.add_argument("--per-pair", type=int, default=64, help="tokens of a sequence for each pair")
    p.add_argument("--queries", type=int, default=8, help="how often each key is asked in training")
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    p.add_argument("--steps", type=int, nargs="+", default=[1000, 400], help="of each length")
    p.add_argument("--soft-until", type=int, default=4096, help="hashed heads read all rows up to this length")
    p.add_argument("--tokens", type=int, default=65536, help="of a step")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--test", type=int, nargs="+", default=[4096, 65536, 262144, 1048576, 16777216])
    p.add_argument("--chunk", type=int, default=1 << 20, help="tokens that a test computes at a time")
    p.add_argument("--least", type=int, default=1 << 20, help="least number of tokens of a test, in several sequences")
    p.add_argument("--compile", action="store_true", help="compile the blocks")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--name", default="run")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args(argv)
    if len(a.lengths) != len(a.steps):
        p.error(f"{len(a.lengths)} lengths and {len(a.steps)} steps: give one for each length")
    return a


def model_of(a: argparse.Namespace, vocabulary: int) -> ld.LongNetLM:
    """Make the model that the command line describes."""
    window = ld.DilatedPattern([ld.Window(a.local)])
    pattern, more = [window] * a.depth, {}
    if a.far == "hashed":
        more = {"hashed": {"layers": [a.far_layer], "soft_until": a.soft_until}}
    elif a.far != "window":
        heads = range(a.heads)
        branches = ld.Window(a.local, heads=tuple(heads[:-1])), ld.Branch(None, 1, heads=(heads[-1],))
        pattern[a.far_layer] = ld.DilatedPattern(branches)
        more = {"global_rotary": a.far == "rotary"}
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


def train(model: ld.LongNetLM, task: Task, a: argparse.Namespace) -> None:
    """Train at each length, with warm-up and a falling learning rate."""
    fused = a.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    gen, total, step = torch.Generator(a.device).manual_seed(1000 + a.seed), sum(a.steps), 0
    began, curve = time.monotonic(), []
    heads = [x for b in model.transformer.blocks if (x := b.attention_layer.hashed) is not None]
    for size, steps in zip(a.lengths, a.steps, strict=True):
        for _ in range(steps):
            tokens, at, answers, _ = task.draw(size, max(1, a.tokens // size), gen, a.queries)
            labels = torch.full_like(tokens, -100).scatter(1, at, answers)
            with mixed(a):
                loss, _ = model.token_mean({"tokens": tokens, "labels": labels})
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = a.lr * min(1, (step + 1) / 100, (1 - step / total) / 0.2)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.detach())
            step += 1
            if step % max(1, total // 10) == 0:
                bits = torch.stack(curve).mean().item() / math.log(2)
                codes = [[round(x, 3) for x in (h.terms.latest[:3] / h.terms.latest[3]).tolist()] for h in heads]
                seconds = round(time.monotonic() - began, 1)
                write(a, {"step": step, "length": size, "bits": round(bits, 3), "codes": codes, "seconds": seconds})
                curve.clear()


@torch.no_grad()
def answers_of(model: ld.LongNetLM, stream: Stream, a: argparse.Namespace) -> Tensor:
    """Return the nats of all answers in a stream."""
    state, nats = None, []
    for start in range(0, stream.size, stream.chunk):
        tokens, (at, answers) = stream.read(start), stream.asked_in(start)
        labels = torch.full_like(tokens, -100)
        labels[0, at] = answers
        with mixed(a):
            losses, state = model.stream(tokens, labels, state, chunk=stream.chunk, per_token=True)
        nats.append(losses[0, at])
    return torch.cat(nats).float()


def test(model: ld.LongNetLM, task: Task, size: int, a: argparse.Namespace) -> dict[str, Any]:
    """Test sequences of this length."""
    began = time.monotonic()
    if a.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    streams = (Stream(task, size, min(size, a.chunk), 7 + i) for i in range(max(1, a.least // size)))
    nats = torch.cat([answers_of(model, stream, a) for stream in streams])
    return {
        "test": size,
        "right": round((nats < math.log(2)).double().mean().item() * 100, 2),
        "asked": len(nats),
        "bits": round(nats.mean().item() / math.log(2), 4),
        "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if a.device == "cuda" else None,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(argv: list[str] | None = None) -> None:
    a = options(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    task = Task("noise", a.keys, a.per_pair, device=a.device)
    model = model_of(a, task.vocabulary)
    model.configure_model()
    model.to(a.device).train()
    args = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    write(a, {"options": args, "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters())})
    train(model, task, a)
    torch.save({"options": args, "weights": model.state_dict()}, a.out / f"{a.name}.pt")
    model.eval()
    for size in a.test:
        write(a, test(model, task, size, a))


if __name__ == "__main__":
    main()
