"""Recall of a model with trained codes over up to a billion tokens, chunk by chunk. Experiment E2 of README.md.

    python benchmarks/far/stream.py rows/codes.pt --tokens 16777216 --name codes --out rows

Every token passes all layers. A layer keeps the last inputs of its convolutions and the last local rows, and the far
head the `latest` rows of each code, so the result equals the model on the whole sequence. Writes a line of JSON to
OUT/NAME.jsonl, and one for each tenth of the stream to the screen.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from model import Carried, Model, Settings, Sizes
from recall import prepare, task_of, write
from task import Stream
from torch import Tensor


def load(path: str, device: str) -> tuple[Model, argparse.Namespace]:
    """Load a trained model, and the options that it was trained with."""
    stored = torch.load(path, map_location=device, weights_only=True)
    model = Model(Sizes(**stored["sizes"])).to(device).eval()
    model.load_state_dict(stored["weights"])
    return model, argparse.Namespace(**{**stored["options"], "device": device})


@torch.no_grad()
def recall(model: Model, stream: Stream, settings: Settings) -> dict[str, Any]:
    """Read the stream. Return a summary of right answers and rows read."""
    device = stream.task.device
    carried = [Carried() for _ in model.layers]
    right, rows, asked_rows, began = [], torch.zeros((), device=device, dtype=torch.float64), [], time.monotonic()
    tenth = max(1, stream.size // stream.chunk // 10) * stream.chunk
    for start in range(0, stream.size, stream.chunk):
        at, answers = stream.asked_in(start)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, aux = model(stream.read(start), at[None], settings, start, carried)
        right.append(logits[0].argmax(-1) == answers)
        rows += aux["rows"].sum()
        asked_rows.append(aux["rows"][0, at])
        if (start + stream.chunk) % tenth == 0:
            answered = torch.cat(right)
            print(json.dumps({"read": start + stream.chunk, "asked": len(answered), "right": int(answered.sum()),
                              "seconds": round(time.monotonic() - began, 1)}), flush=True)  # fmt: skip
    return summary(
        torch.cat(right), rows.item() / stream.size, torch.cat(asked_rows), carried[model.sizes.far_layer], began
    )


def summary(right: Tensor, rows: float, asked_rows: Tensor, carried: Carried, began: float) -> dict[str, Any]:
    memory = torch.cuda.max_memory_allocated() / 2**30 if right.is_cuda else 0.0
    return {
        "right": round(right.double().mean().item() * 100, 2), "asked": len(right), "rows": round(rows, 2),
        "rows asked": round(asked_rows.double().mean().item(), 2), "rows kept": len(carried.rows.code),
        "seconds": round(time.monotonic() - began, 1), "gib": round(memory, 2),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("weights", help="a file of recall.py")
    p.add_argument("--tokens", type=int, required=True)
    p.add_argument("--chunk", type=int, default=1 << 20, help="tokens at a time: a multiple of the local segments")
    p.add_argument("--probes", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--name", default="stream", help="of the file")
    p.add_argument("--out", type=Path, required=True, help="folder of the file")
    a = p.parse_args(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    prepare(a.compile)
    model, trained = load(a.weights, a.device)
    if model.sizes.far != "codes":
        p.error(f"{a.weights} has the far head {model.sizes.far!r}; only codes are streamed")
    if a.chunk % trained.local[-1]:
        p.error(f"--chunk is {a.chunk}, and local segments {trained.local[-1]}: take a multiple")
    chunk = min(a.chunk, a.tokens)
    stream = Stream(task_of(trained), a.tokens, chunk, a.seed)
    row = recall(model, stream, Settings(trained.local[-1], a.probes))
    write(a, {"stream": a.tokens, "weights": a.weights, "chunk": chunk, "probes": a.probes, "seed": a.seed, **row})


if __name__ == "__main__":
    main()
