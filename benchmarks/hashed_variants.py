# ruff: noqa
"""Try sizes of tiles of the kernels of hashed attention (temporary)."""

import argparse, json, os, sys, traceback
from unittest import mock
import torch
from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.hashed import kernels, token_kernels

F, R, O = "forward", "over rows", "over lookups"
NAMES = {F: "_forward", R: "_over_rows", O: "_over_lookups"}
# kernel, tile, warps, stages, chances
V = [
    (F, t, w, 1, "tf32")
    for t, w in [
        ((64, 64), 4),
        ((64, 64), 8),
        ((64, 32), 4),
        ((32, 32), 4),
        ((32, 32), 2),
        ((32, 64), 4),
        ((128, 32), 4),
        ((128, 32), 8),
        ((128, 64), 8),
    ]
]
V += [
    (R, t, w, 1, "tf32")
    for t, w in [
        ((64, 32), 4),
        ((32, 32), 4),
        ((32, 32), 2),
        ((32, 64), 4),
        ((64, 16), 4),
        ((64, 32), 8),
        ((128, 32), 8),
        ((32, 64), 8),
    ]
]
V += [
    (O, t, w, 1, "tf32")
    for t, w in [
        ((32, 64), 4),
        ((64, 64), 4),
        ((64, 64), 8),
        ((32, 32), 4),
        ((32, 32), 2),
        ((64, 32), 4),
        ((128, 32), 4),
        ((128, 64), 8),
        ((16, 64), 4),
        ((32, 128), 8),
        ((64, 32), 2),
    ]
]
V += [(O, (32, 64), 4, 2, "tf32"), (O, (64, 64), 4, 2, "tf32"), (O, (32, 64), 4, 3, "tf32")]
V += [(F, (64, 64), 4, 1, "bf16x3"), (R, (64, 32), 4, 1, "bf16x3"), (O, (32, 64), 4, 1, "bf16x3")]
V += [
    (F, (64, 64), 4, 1, "bf16"),
    (R, (64, 32), 4, 1, "bf16"),
    (O, (32, 64), 4, 1, "bf16"),
    (O, (64, 64), 4, 1, "bf16"),
]


def inputs(n):
    torch.manual_seed(0)
    draw = lambda *s: torch.randn(s, device="cuda", dtype=torch.bfloat16)
    q, k, v = (draw(1, n, 1, 64) for _ in range(3))
    z = [2 * draw(1, n, 1, 4, 16) for _ in range(2)]
    return [x.requires_grad_() for x in (q, k, v, *z, draw(1))], torch.randn_like(q)


def step(x, grad):
    out, losses = hashed_attention(*x, probes=2)
    loss = losses.agree.mean() + losses.contrast.mean() + losses.balance.sum() + losses.spread.sum()
    return out, *torch.autograd.grad((out, loss), x, (grad, torch.ones_like(loss)))


def patched(kernel, tile, warps, stages, chances):
    options, code = kernels.Call.options, token_kernels.code

    def changed(self, name):
        o = options(self, name)
        if name == kernel:
            o |= {"LOOKUPS": tile[0], "ROWS": tile[1], "num_warps": warps, "num_stages": stages}
            o["CHANCES"] = "tf32" if chances == "bf16" else chances
        return o

    def coded(*a):
        c = code(*a)
        return c._replace(chance_q=c.chance_q.bfloat16(), chance_k=c.chance_k.bfloat16()) if chances == "bf16" else c

    return mock.patch.object(kernels.Call, "options", changed), mock.patch.object(token_kernels, "code", coded)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("n", type=int)
    p.add_argument("index", type=int)
    p.add_argument("of", type=int)
    p.add_argument("state")
    a = p.parse_args()
    x, grad = inputs(a.n)
    want = step(x, grad)
    for i in range(a.index, len(V), a.of):
        done, name = f"{a.state}/{i}", " ".join(map(str, V[i]))
        if a.of == 1 and not os.path.exists(done):
            continue
        try:
            one, two = patched(*V[i])
            with one, two:
                got = step(x, grad)
                error = max(((g - w).float().abs().max() / w.float().abs().max()).item() for g, w in zip(got, want))
                same = all(torch.equal(g, w) for g, w in zip(step(x, grad), got))
                torch.cuda.synchronize()
                ms = []
                if a.of == 1:
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                        for _ in range(3):
                            step(x, grad)
                        torch.cuda.synchronize()
                    ms = [e.self_device_time_total / 3e3 for e in profile.key_averages() if e.key == NAMES[V[i][0]]]
            if a.of > 1:
                open(done, "w").close()
                print(
                    name, f"compiled, error {error:.1e} same {same}", flush=True
                ) if error > 2e-2 or not same else None
            else:
                print(f"{name}: {ms[0] if ms else -1:.3f} ms, error {error:.1e}, same {same}", flush=True)
        except Exception as e:
            print(name, "FAILED", type(e).__name__, str(e)[:90].replace("\n", " "), flush=True)
            if "illegal" in str(e) or "misaligned" in str(e):
                sys.exit(1)


if __name__ == "__main__":
    main()
