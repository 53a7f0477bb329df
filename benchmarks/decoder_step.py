"""Time a step of a Llama-shaped transformers decoder as `HFCausalLM`, and of the same decoder in transformers alone.

    python benchmarks/decoder_step.py --size 1.3B --seq-len 32768 131072
    python benchmarks/decoder_step.py --size 8B --lora 16 --seq-len 32768
    python benchmarks/decoder_step.py --size 8B --lora 16 --seq-len 131072 --layer-tile 8192

Ways: `dense` is the decoder's own attention in "ring_dilated"; `hybrid` has one dense head in every fourth layer and local
segments of 2,048; `sdpa-cudnn` and `sdpa-flash` are transformers' decoder with a backend of torch's attention. All have
random weights, recompute layers in the backward, and use fused AdamW and a loss in tiles of tokens. For the first two
ways, `--compile` compiles layers, and `--layer-tile` computes feed-forwards in tiles. The allocator uses expandable
segments, because otherwise fragments would exhaust the memory for lengths that nearly fill the GPU, and it leaves 1 GiB
to libraries. Columns are milliseconds of the median step and peak memory, and for the first two ways the planned values. A
row that runs out of memory has the peaks of used and reserved memory, and the size of the failed request.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_dilated._device import expandable_segments, leave_room
from lightning_dilated.ext.planning.counting.model_specs import Facts, counted_model_of
from lightning_dilated.ext.planning.estimate import Case
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.memory import GIB
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.integrations.transformers import HFCausalLM
from lightning_dilated.memory.settings import MemorySettings

SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 256},
    "1.3B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
             "intermediate_size": 5504, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "vocab_size": 128256},
}  # fmt: skip
BACKENDS = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
TILE = 4096


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", choices=SIZES, default="1.3B")
    p.add_argument("--seq-len", type=int, nargs="+", default=[32768])
    p.add_argument("--lora", type=int, help="the rank of the adapters of all projections; weights are bf16 then")
    p.add_argument("--ways", nargs="+", default=["dense", "sdpa-cudnn", "sdpa-flash", "hybrid"])
    p.add_argument("--layer-tile", type=int, help="tokens of a tile of the feed-forwards of dense and hybrid")
    p.add_argument("--compile", action="store_true", help="compile the layers of dense and hybrid")
    p.add_argument("--steps", type=int, default=3, help="measured")
    p.add_argument("--warm", type=int, default=2, help="steps before those")
    p.add_argument("--device", default="cuda")
    p.add_argument("--gpu", default="H100", help="that `plan` is asked for")
    return p.parse_args()


def config_of(a: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES[a.size], max_position_embeddings=max(a.seq_len), use_cache=False, pad_token_id=None,
                       bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)  # fmt: skip


def lora_of(a: argparse.Namespace) -> dict[str, Any]:
    """Return options for peft."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {"r": a.lora, "lora_alpha": 2 * a.lora, "target_modules": names}


def settings(a: argparse.Namespace) -> MemorySettings:
    """Return the memory settings of the ways dense and hybrid."""
    return MemorySettings("block", tile=a.layer_tile)


def ours(a: argparse.Namespace, way: str, **options: Any) -> HFCausalLM:
    """Return the HFCausalLM of a way, before it is built; `options` replace its options."""
    pattern = {"hybrid": {"local": 2048, "global_every": 4}} if way == "hybrid" else None
    options = {"tile": TILE, "gradient_checkpointing": True, "compile_blocks": a.compile} | options
    return HFCausalLM(config_of(a), pattern, lora=lora_of(a) if a.lora else None, **options)


def of_transformers(a: argparse.Namespace) -> torch.nn.Module:
    """Build the decoder of transformers alone, with peft's adapters."""
    from transformers import AutoModelForCausalLM

    decoder = AutoModelForCausalLM.from_config(
        config_of(a), attn_implementation="sdpa", dtype=torch.get_default_dtype()
    )
    decoder.gradient_checkpointing_enable({"use_reentrant": False})
    if a.lora:
        from peft import LoraConfig, get_peft_model

        decoder.enable_input_require_grads()
        return get_peft_model(decoder, LoraConfig(**lora_of(a))).base_model.model
    return decoder


def peer_loss(decoder: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, with logits for `TILE` tokens at a time."""
    hidden = decoder.model(input_ids=tokens)[0][0]
    nats = lambda x, y: cross_entropy(decoder.lm_head(x).float(), y, reduction="sum")  # noqa: E731
    parts = zip(hidden.split(TILE), labels[0].split(TILE), strict=True)
    return torch.stack([checkpoint(nats, x, y, use_reentrant=False) for x, y in parts]).sum() / labels.numel()


def planned(a: argparse.Namespace, way: str, tokens: int) -> list[str]:
    """Return [GiB, ms] that `plan` predicts for a step, or the reason why there is no plan."""
    try:
        model, gpu = ours(a, way), find_gpu(a.gpu)
        subject = counted_model_of(
            model, "bf16-true" if a.lora else "bf16-mixed", settings(a), a.compile, gpu.capability
        )
        case = Case(subject, Facts.of(model, subject), Setup("single", 1), gpu)
        planned = case.memory(subject.memory, tokens), case.time(subject.memory, tokens)
        return [f"{planned[0].peak / GIB:.1f}", f"{1e3 * planned[1].seconds:.0f}"]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:80], ""]


def train_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, autocast: torch.autocast) -> None:
    """Step in the Trainer's order: the forward comes before the previous gradients are freed. Only it has autocast."""
    with autocast:
        value = loss()
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def measured(a: argparse.Namespace, loss: Callable[[], Tensor], parameters: list[Tensor]) -> list[str]:
    """Return [seconds, GiB] of a step."""
    cuda = a.device == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=cuda)
    seconds = []
    for _ in range(a.warm + a.steps):
        begin = time.perf_counter()
        train_step(loss, optimizer, torch.autocast(a.device, torch.bfloat16, enabled=not a.lora))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else float("nan")
    return [statistics.median(seconds[a.warm :]), f"{peak:.1f}"]


def row(a: argparse.Namespace, way: str, tokens: int) -> str:
    device, ids = (
        torch.device(a.device),
        torch.randint(0, SIZES[a.size]["vocab_size"], (1, tokens + 1), device=a.device),
    )
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
    torch.set_default_dtype(torch.bfloat16 if a.lora else torch.float32)
    try:
        with device:
            if way in BACKENDS:
                model: Any = of_transformers(a)
            else:
                model = ours(a, way)
                model.configure_model()
                model.transformer.memory = settings(a)
    finally:
        torch.set_default_dtype(torch.float32)
    model.to(device).train()
    if way in BACKENDS:
        loss, context = lambda: peer_loss(model, *batch.values()), sdpa_kernel(BACKENDS[way])
    else:
        loss, context = lambda: (lambda t: t[0] / t[1])(model.loss_terms(batch)), contextlib.nullcontext()
    with context:
        seconds, peak = measured(a, loss, [p for p in model.parameters() if p.requires_grad])
    plan = ["", ""] if way in BACKENDS else planned(a, way, tokens)
    cells = [*name_of(a, way, tokens), f"{1e3 * seconds:.0f}", f"{tokens / seconds / 1e3:.1f}K", peak, *plan]
    return f"| {' | '.join(cells)} |"


def name_of(a: argparse.Namespace, way: str, tokens: int) -> list[str]:
    """Return the cells that identify a row."""
    text = way
    if way not in BACKENDS:
        text += ", compiled" if a.compile else ""
        text += f", tiles of {a.layer_tile:,}" if a.layer_tile else ""
    return [a.size + (f", adapters of rank {a.lora}" if a.lora else ""), f"{tokens:,}", text]


def held(error: torch.OutOfMemoryError) -> list[str]:
    """Return the cells of a row without a result: the reason, and the used, reserved and requested memory of torch."""
    used, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    request = re.search(r"Tried to allocate (\d[\d.]* \w+)", str(error))
    return ["out of memory", "", f"{used:.1f} of {reserved:.1f}" + (f", asked for {request[1]}" if request else "")]


def main() -> None:
    """Print the table, including rows that run out of memory."""
    a = options()
    expandable_segments(os.environ)
    if a.device == "cuda":
        leave_room(torch.device(a.device, torch.cuda.current_device()))
    print("| decoder | tokens | way | ms a step | tokens/s | GiB | planned GiB | planned ms |\n" + "| --- " * 8 + "|")
    for tokens in a.seq_len:
        for way in a.ways:
            torch.manual_seed(0)
            if a.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                print(row(a, way, tokens), flush=True)
            except torch.OutOfMemoryError as error:
                plan = ["", ""] if way in BACKENDS else planned(a, way, tokens)
                print(f"| {' | '.join([*name_of(a, way, tokens), *held(error), *plan])} |", flush=True)
            gc.collect()
            torch.compiler.reset()
            if a.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
