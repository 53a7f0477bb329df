"""Time a LongNetLM with random weights reading a prompt and drawing tokens, in bf16 on one GPU.

    python benchmarks/decode.py --context 4096 65536 1048576
    python benchmarks/decode.py --context 65536 --batch 16
    python benchmarks/decode.py --context 65536 --hybrid 4
    python benchmarks/decode.py --context 4096 65536 1048576 --hashed 0 --segments 2048 --dilations 1
    python benchmarks/decode.py --context 4096 --peer        # and transformers' Llama of the same size, in the same run
    python benchmarks/decode.py --context 65536 --plain      # without CUDA graphs
    python benchmarks/decode.py --context 65536 --profile    # and the kernels of a token, by time
    python benchmarks/decode.py --device cpu --context 256 --dim 64 --depth 2 --heads 2 --tokens 8

Prints a row per context: milliseconds per token (median of `--rounds` calls, minus a call that draws one token), tokens
per second over all samples, and prompt tokens per second in the first call, in the second call, and in a forward pass
over the prompt without a cache (median of `--rounds` passes after a first one).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import lightning_dilated as ld
from lightning_dilated.ext.decoding import token_step


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--context", type=int, nargs="+", default=[4096, 65536, 1048576])
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--tokens", type=int, default=256, help="drawn after the prompt")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--dim", type=int, default=768)
    p.add_argument("--depth", type=int, default=12)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--kv-heads", type=int)
    p.add_argument("--vocabulary", type=int, default=256)
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--hybrid", type=int, help="N: a dense head in every N-th layer, and local segments of 2,048")
    p.add_argument("--hashed", type=int, nargs="+", help="layers with one hashed head")
    p.add_argument("--compile", action="store_true", help="compile_blocks=True")
    p.add_argument("--plain", action="store_true", help="call the model for every token, without CUDA graphs")
    p.add_argument("--temperature", type=float, default=0.8)
    p.add_argument("--top-k", type=int, default=50)
    p.add_argument("--top-p", type=float)
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument(
        "--peer", action="store_true", help="a Llama of transformers with a static cache and torch.compile, too"
    )
    p.add_argument("--profile", action="store_true")
    return p.parse_args()


def ours(o: argparse.Namespace) -> tuple[torch.nn.Module, str]:
    """Return (model, description of the pattern)."""
    if o.hybrid:
        pattern: Any = {"hybrid": {"local": 2048, "global_every": o.hybrid}}
        name = f"hybrid, a dense head in one layer of {o.hybrid}"
    else:
        pattern = ld.DilatedPattern.longnet(o.segments, o.dilations)
        name = ", ".join(f"({w}, {r})" for w, r in zip(o.segments, o.dilations, strict=True))
    more = {"hashed": {"layers": o.hashed}} if o.hashed else {}
    name += f", a hashed head in layers {o.hashed}" if o.hashed else ""
    model = ld.LongNetLM(
        pattern, vocab_size=o.vocabulary, dim=o.dim, depth=o.depth, num_heads=o.heads, num_kv_heads=o.kv_heads,
        max_seq_len=max(o.context) + o.tokens, compile_blocks=o.compile,
        **more,
    )  # fmt: skip
    model.configure_model()
    return model.to(o.device, getattr(torch, o.dtype)).eval(), name


def llama(o: argparse.Namespace) -> torch.nn.Module:
    """Build a Llama of transformers with the sizes of this script's model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=o.vocabulary, hidden_size=o.dim, num_hidden_layers=o.depth, num_attention_heads=o.heads,
        num_key_value_heads=o.kv_heads or o.heads, intermediate_size=-(-8 * o.dim // 3 // 32) * 32,
        max_position_embeddings=max(o.context) + o.tokens, tie_word_embeddings=True, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(o.device, getattr(torch, o.dtype)).eval()


def seconds(device: str, call: Callable[[], Any]) -> float:
    """Return the seconds of a call until the device has finished."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def forward_seconds(o: argparse.Namespace, forward: Callable[[torch.Tensor], Any], prompt: torch.Tensor) -> float:
    """Return the seconds of a pass over the prompt, after a first pass."""
    forward(prompt)  # the first pass compiles
    return statistics.median(seconds(o.device, lambda: forward(prompt)) for _ in range(o.rounds))


def measure(
    o: argparse.Namespace,
    generate: Callable[[torch.Tensor, int], Any],
    forward: Callable[[torch.Tensor], Any],
    context: int,
) -> list[str]:
    """Return [ms per token, tokens/s, prompt tokens/s in the first call, in the second, in a forward pass]."""
    prompt = torch.randint(o.vocabulary, (o.batch, context), device=o.device)
    first, second = (seconds(o.device, lambda: generate(prompt, 1)) for _ in range(2))
    generate(prompt, 1 + o.tokens)  # this call captures or compiles
    times = [[seconds(o.device, lambda n=n: generate(prompt, n)) for n in (1, 1 + o.tokens)] for _ in range(o.rounds)]
    each = statistics.median((many - one) / o.tokens for one, many in times)
    speeds = (o.batch * context / s for s in (first, second, forward_seconds(o, forward, prompt)))
    return [f"{1e3 * each:.2f}", f"{o.batch / each:,.0f}", *(f"{x:,.0f}" for x in speeds)]


def row(
    o: argparse.Namespace, model: torch.nn.Module, name: str, pattern: str, context: int, numbers: list[str]
) -> str:
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M"
    return f"| {' | '.join([f'{name}, {size}', pattern, f'{context:,}', str(o.batch), *numbers])} |"


def show_profile(o: argparse.Namespace, generate: Callable[[torch.Tensor, int], Any], context: int) -> None:
    """Print the kernels of drawn tokens by time: all kernels of a call, minus the kernels of a call for one token."""
    from torch.profiler import ProfilerActivity, profile

    prompt = torch.randint(o.vocabulary, (o.batch, context), device=o.device)
    totals: list[dict[str, tuple[float, int]]] = []
    for count in (1, 33):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds(o.device, lambda n=count: generate(prompt, n))
        totals.append({e.key: (e.device_time_total, e.count) for e in profiler.key_averages()})
    each = {k: (t - totals[0].get(k, (0, 0))[0], n - totals[0].get(k, (0, 0))[1]) for k, (t, n) in totals[1].items()}
    kernels = sum(n for _, n in each.values()) / 32
    print(f"a token: {sum(t for t, _ in each.values()) / 32:.0f} us in {kernels:.0f} kernels")
    for key, (time_us, count) in sorted(each.items(), key=lambda item: -item[1][0])[:25]:
        print(f"{time_us / 32:8.1f} us {count / 32:6.1f} x {key[:100]}")


def main() -> None:
    o = options()
    torch.manual_seed(0)
    model, pattern = ours(o)
    sampling = {"temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p}
    longest = max(o.context) + o.tokens + 1

    def drawn(prompt: torch.Tensor, count: int) -> torch.Tensor:
        most = min(longest, prompt.shape[1] + o.tokens + 1)
        return model.generate(prompt, count, **sampling, max_length=most)

    if o.device.startswith("cuda"):
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
        reason = "--plain" if o.plain else token_step.why_not(model, torch.device(o.device))
        print("every token by a call" if reason else "captured token steps", reason or "")
    print(
        "| model | pattern | context | batch | ms a token | tok/s | prompt tok/s, first call | second call | forward tok/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    plain = mock.patch.object(token_step, "why_not", lambda *args: "--plain") if o.plain else mock.MagicMock()
    with plain:
        for context in o.context:
            numbers = measure(o, drawn, model, context)
            print(row(o, model, "LongNetLM", pattern, context, numbers), flush=True)
            if o.profile:
                show_profile(o, drawn, context)
            token_step.forget(model)
    if o.peer:
        peer = llama(o)
        greedy = {"do_sample": True, "temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p or 1.0}

        def of_peer(prompt: torch.Tensor, count: int) -> Any:
            return peer.generate(
                prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count, max_new_tokens=count, **greedy,
                cache_implementation="static",
            )  # fmt: skip

        for context in o.context:
            numbers = measure(o, of_peer, partial(peer, use_cache=False), context)
            print(row(o, peer, "Llama (static cache)", "dense", context, numbers), flush=True)


if __name__ == "__main__":
    main()
