"""Wrong calls of dilated_attention: each error names the argument, what was given, and what to do."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import Branch, DilatedPattern

PATTERN = DilatedPattern.longnet([4, 8], [1, 2])
Q = torch.randn(2, 16, 4, 8)
ONE = torch.randn(1, 16, 4, 8)
INT32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731


def call(q=Q, k=None, v=None, pattern=PATTERN, **options):
    k = q if k is None else k
    return lambda: dilated_attention(q, k, k if v is None else v, pattern, **options)


def packed(*bounds, dtype=torch.int32):
    return call(ONE, cu_seqlens=torch.tensor(bounds, dtype=dtype))


def on_mps():
    """A call with tensors that say they are on Apple's GPU; no test machine has one."""
    with FakeTensorMode():
        return dilated_attention(*(torch.empty(1, 16, 4, 8, device="mps") for _ in range(3)), PATTERN)


# name: (call, exception, what its message must hold)
TENSORS = {
    "q a list": (call(Q.tolist(), Q), TypeError, ["^q must be a torch.Tensor", "got list"]),
    "v None": (lambda: dilated_attention(Q, Q, None, PATTERN), TypeError, ["^v must be a torch.Tensor", "NoneType"]),
    "q 3-D": (call(Q[0], Q), ValueError, ["^q must have 4 dimensions", r"\(B, N, heads, D\)", r"\(16, 4, 8\)"]),
    "v 5-D": (call(Q, Q, Q[None]), ValueError, ["^v must have 4 dimensions", r"\(1, 2, 16, 4, 8\)"]),
    "q integers": (call(Q.int()), TypeError, ["^q must be floating point", "int32", r"q\.to\(torch\.bfloat16\)"]),
    "q complex": (call(Q + 0j), TypeError, ["^q must be floating point", "complex64"]),
    "k double": (call(Q, Q.double()), TypeError, ["one dtype", "q is torch.float32", "k is torch.float64"]),
    "v half": (call(Q, Q, Q.half()), TypeError, ["one dtype", "v is torch.float16"]),
    "k elsewhere": (call(Q, Q.to("meta")), ValueError, ["one device", "q is on cpu", "k on meta"]),
    "v shorter": (call(Q, Q, Q[:, :8]), ValueError, ["k and v must have one shape", r"\(2, 8, 4, 8\)"]),
    "other D for v": (call(Q, Q, Q[..., :4]), ValueError, ["k and v must have one shape", r"\(2, 16, 4, 4\)"]),
    "k, v shorter": (
        call(Q, Q[:, :8]),
        ValueError,
        ["same B and N", "16", "8", "new_cache of MultiheadDilatedAttention"],
    ),
    "other batch": (call(Q, Q[:1]), ValueError, ["same B and N", r"\(2, 16\)", r"\(1, 16\)"]),
    "other D for k": (call(Q, Q[..., :4]), ValueError, ["head dim D", "8 and 4"]),
    "no heads": (call(Q[:, :, :0], Q), ValueError, ["heads", "at least 1", r"\(2, 16, 0, 8\)"]),
    "no kv heads": (call(Q, Q[:, :, :0]), ValueError, ["heads", "at least 1", r"\(2, 16, 0, 8\)"]),
    "no D": (call(Q[..., :0]), ValueError, ["head dim", "at least 1"]),
    "kv heads do not divide": (call(Q, Q[:, :, :3]), ValueError, ["3 kv heads", "divide", "4 query heads"]),
    "more kv heads": (call(Q[:, :, :2], Q), ValueError, ["4 kv heads", "divide", "2 query heads"]),
    "Apple's GPU": (on_mps, ValueError, ["^q is on mps", "not tested", r"q\.cpu\(\)", "accelerator='cpu'"]),
    "float8": (call(Q.to(torch.float8_e4m3fn)), TypeError, ["^q must be", "float8_e4m3fn"]),
}

OPTIONS = {
    "pattern a list": (
        call(pattern=[(4, 1)]),
        TypeError,
        ["^pattern must be a DilatedPattern", r"\[\(4, 1\)\]", "longnet"],
    ),
    "pattern None": (call(pattern=None), TypeError, ["^pattern must be a DilatedPattern", "got None"]),
    "pattern a Branch": (call(pattern=Branch(4, 1)), TypeError, ["^pattern must be a DilatedPattern"]),
    "pattern of more heads": (
        call(pattern=DilatedPattern([Branch(4, 1, heads=[4])])),
        ValueError,
        [r"branches\[0\] serves head 4", "only 4 query heads"],
    ),
    "pattern splits a group": (
        call(Q, Q[:, :, :2], pattern=DilatedPattern([Branch(4, 1, heads=[1])], offset_heads="kv")),
        ValueError,
        [r"branches\[0\]\.heads=\[1\]", "splits a group of 2", "whole groups"],
    ),
    "pattern attended": (
        call(pattern=DilatedPattern([(8, 2), (9, 2)], padding="attended")),
        ValueError,
        [r"branches\[1\]", "segment_length=9", "dilation_rate=2", "16 tokens", "padding='masked'"],
    ),
    "causal 1": (call(causal=1), TypeError, ["^causal must be True or False", "got 1"]),
    "causal None": (call(causal=None), TypeError, ["^causal must be True or False", "got None"]),
    "causal a tensor": (call(causal=torch.tensor(True)), TypeError, ["^causal must be True or False"]),
    "dropout 1": (call(dropout=1.0), ValueError, ["^dropout", r"\[0, 1\)", r"got 1\.0"]),
    "dropout negative": (call(dropout=-0.1), ValueError, ["^dropout", r"\[0, 1\)", r"got -0\.1"]),
    "dropout True": (call(dropout=True), TypeError, ["^dropout", "number", "got True"]),
    "dropout a str": (call(dropout="0.1"), TypeError, ["^dropout", "number", "'0.1'"]),
    "dropout nan": (call(dropout=float("nan")), ValueError, ["^dropout", "number", "nan"]),
    "scale nan": (call(scale=float("nan")), ValueError, ["^scale", "finite", "nan"]),
    "scale inf": (call(scale=float("inf")), ValueError, ["^scale", "finite", "inf"]),
    "scale a str": (call(scale="auto"), ValueError, ["^scale", "finite number or None", "'auto'"]),
    "scale True": (call(scale=True), ValueError, ["^scale", "finite number or None", "True"]),
    "engine unknown": (call(engine="fast"), ValueError, ["^engine must be one of", "auto, .*math", "'fast'"]),
    "engine None": (call(engine=None), ValueError, ["^engine must be one of", "got None"]),
    "engine of another device": (
        call(engine="cudnn"),
        ValueError,
        ["engine='cudnn' cannot serve", "runs on cuda, not on cpu", "Use engine='cpu_flash' or 'math'"],
    ),
    "engine without dropout": (
        call(engine="sdpa", dropout=0.1),
        ValueError,
        ["engine='sdpa' cannot serve", "cpu_flash has no attention dropout", "Use engine='math'"],
    ),
    "option unknown": (call(is_causal=True), TypeError, ["is_causal"]),
    "option by position": (lambda: dilated_attention(Q, Q, Q, PATTERN, True), TypeError, ["positional"]),
}

DOCUMENTS = {
    "lengths an int": (call(lengths=16), TypeError, ["^lengths must be an integer tensor or a list", "got 16"]),
    "lengths a str": (call(lengths="16"), TypeError, ["^lengths must be an integer tensor or a list", "'16'"]),
    "lengths of floats": (call(lengths=[8.0, 16.0]), TypeError, ["^lengths must hold integers", r"8\.0"]),
    "lengths a float tensor": (call(lengths=torch.ones(2)), TypeError, ["^lengths must hold integers", "float32"]),
    "lengths a mask": (call(lengths=torch.ones(2, 16, dtype=torch.bool)), TypeError, ["^lengths", "integers", "bool"]),
    "lengths of one sample": (call(lengths=[16]), ValueError, ["^lengths", "one entry a sample", r"\(2,\)", r"\(1,\)"]),
    "lengths 2-D": (call(lengths=INT32(8, 16)[None]), ValueError, ["^lengths", "one entry a sample", r"\(1, 2\)"]),
    "lengths too large": (call(lengths=[8, 17]), ValueError, ["^lengths", r"0\.\.16", "padded length", "8 to 17"]),
    "lengths negative": (call(lengths=[-1, 16]), ValueError, ["^lengths", r"0\.\.16", "-1 to 16"]),
    "both": (call(ONE, lengths=[16], cu_seqlens=INT32(0, 16)), ValueError, ["lengths.*or cu_seqlens.*not both"]),
    "not from 0": (packed(1, 16), ValueError, ["^cu_seqlens must rise from 0", r"\[1, 16\]"]),
    "not to N": (packed(0, 15), ValueError, ["^cu_seqlens", r"number of tokens \(16\)", r"\[0, 15\]"]),
    "beyond N": (packed(0, 17), ValueError, ["^cu_seqlens", r"number of tokens \(16\)", r"\[0, 17\]"]),
    "falling": (packed(0, 9, 7, 16), ValueError, ["^cu_seqlens must rise", r"\[0, 9, 7, 16\]"]),
    "falling, long": (
        packed(0, *range(10, 0, -1), 16),
        ValueError,
        ["^cu_seqlens must rise", r"\[0, 10, 9, 8, \.\.\., 16\]"],
    ),
    "int64": (packed(0, 16, dtype=torch.int64), ValueError, ["^cu_seqlens", "int32", r"\.to\('cpu', torch\.int32\)"]),
    "elsewhere": (call(ONE, cu_seqlens=INT32(0, 16).to("meta")), ValueError, ["^cu_seqlens", "on the CPU", "on meta"]),
    "floats": (packed(0, 16, dtype=torch.float32), TypeError, ["^cu_seqlens must hold integers", "float32"]),
    "a str": (call(ONE, cu_seqlens="0,16"), TypeError, ["^cu_seqlens must be an integer tensor", "'0,16'"]),
    "2-D": (call(ONE, cu_seqlens=INT32(0, 16)[None]), ValueError, ["^cu_seqlens", r"documents \+ 1,", r"\(1, 2\)"]),
    "one bound": (packed(16), ValueError, ["^cu_seqlens", r"at least \[0, N\]", r"\(1,\)"]),
    "batch 2": (call(cu_seqlens=INT32(0, 16)), ValueError, ["cu_seqlens", "batch of 1", "B=2", "pack them"]),
}


TABLES = {"tensors": TENSORS, "options": OPTIONS, "documents": DOCUMENTS}
WRONG = {f"{t}: {n}": row for t, rows in TABLES.items() for n, row in rows.items()}


@pytest.mark.parametrize("run, error, texts", WRONG.values(), ids=WRONG)
def test_misuse(run, error, texts):
    with pytest.raises(error) as caught:
        run()
    message = str(caught.value)
    missing = [text for text in texts if not re.search(text, message)]
    assert type(caught.value) is error and not missing, f"{message!r} does not say {missing}"


ALLOWED = {
    "numbers where floats are meant": {"scale": 1, "dropout": 0},
    "lengths a list": {"lengths": [16, 0]},
    "lengths a tuple": {"lengths": (16, 3)},
    "lengths int32": {"lengths": INT32(16, 3)},
    "lengths int64": {"lengths": torch.tensor([16, 3])},
    "lengths uint8": {"lengths": torch.tensor([16, 3], dtype=torch.uint8)},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    assert dilated_attention(Q, Q, Q, PATTERN, **ALLOWED[name]).isfinite().all()


def test_bounds_as_a_list():
    want = dilated_attention(ONE, ONE, ONE, PATTERN, cu_seqlens=INT32(0, 5, 16))
    assert torch.equal(dilated_attention(ONE, ONE, ONE, PATTERN, cu_seqlens=[0, 5, 16]), want)
