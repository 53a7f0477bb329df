"""Wrong calls of dilated_attention: each error names the argument, its value, and the remedy."""

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
    """Call the op with tensors that pretend to be on Apple's GPU, because no test machine has one."""
    with FakeTensorMode():
        return dilated_attention(*(torch.empty(1, 16, 4, 8, device="mps") for _ in range(3)), PATTERN)


# (call, exception, part of its message)
TENSORS = [
    (call(Q.tolist(), Q), TypeError, "^q must be a torch.Tensor.*got list"),
    (lambda: dilated_attention(Q, Q, None, PATTERN), TypeError, "^v must be a torch.Tensor.*NoneType"),
    (call(Q[0], Q), ValueError, r"^q must have 4 dimensions.*\(B, N, heads, D\).*\(16, 4, 8\)"),
    (call(Q, Q, Q[None]), ValueError, r"^v must have 4 dimensions.*\(1, 2, 16, 4, 8\)"),
    (call(Q.int()), TypeError, r"^q must be floating point.*int32.*q\.to\(torch\.bfloat16\)"),
    (call(Q + 0j), TypeError, "^q must be floating point.*complex64"),
    (call(Q, Q.double()), TypeError, "one dtype.*q is torch.float32.*k is torch.float64"),
    (call(Q, Q, Q.half()), TypeError, "one dtype.*v is torch.float16"),
    (call(Q, Q.to("meta")), ValueError, "one device.*q is on cpu.*k on meta"),
    (call(Q, Q, Q[:, :8]), ValueError, r"k and v must have one shape.*\(2, 8, 4, 8\)"),
    (call(Q, Q, Q[..., :4]), ValueError, r"k and v must have one shape.*\(2, 16, 4, 4\)"),
    (call(Q, Q[:, :8]), ValueError, "same B and N.*16.*8.*new_cache of MultiheadDilatedAttention"),
    (call(Q, Q[:1]), ValueError, r"same B and N.*\(2, 16\).*\(1, 16\)"),
    (call(Q, Q[..., :4]), ValueError, "head dim D.*8 and 4"),
    (call(Q[:, :, :0], Q), ValueError, r"heads.*at least 1.*\(2, 16, 0, 8\)"),
    (call(Q, Q[:, :, :0]), ValueError, r"heads.*at least 1.*\(2, 16, 0, 8\)"),
    (call(Q[..., :0]), ValueError, "head dim.*at least 1"),
    (call(Q, Q[:, :, :3]), ValueError, "3 kv heads.*divide.*4 query heads"),
    (call(Q[:, :, :2], Q), ValueError, "4 kv heads.*divide.*2 query heads"),
    (on_mps, ValueError, r"^q is on mps.*not tested.*q\.cpu\(\).*accelerator='cpu'"),
    (call(Q.to(torch.float8_e4m3fn)), TypeError, "^q must be.*float8_e4m3fn"),
]

OPTIONS = [
    (call(pattern=[(4, 1)]), TypeError, r"^pattern must be a DilatedPattern.*\[\(4, 1\)\].*longnet"),
    (call(pattern=None), TypeError, "^pattern must be a DilatedPattern.*got None"),
    (call(pattern=Branch(4, 1)), TypeError, "^pattern must be a DilatedPattern"),
    (
        call(pattern=DilatedPattern([Branch(4, 1, heads=[4])])),
        ValueError,
        r"branches\[0\] serves head 4.*only 4 query heads",
    ),
    (
        call(Q, Q[:, :, :2], pattern=DilatedPattern([Branch(4, 1, heads=[1])], offset_heads="kv")),
        ValueError,
        r"branches\[0\]\.heads=\[1\].*splits a group of 2.*whole groups",
    ),
    (
        call(pattern=DilatedPattern([(8, 2), (9, 2)], padding="attended")),
        ValueError,
        r"branches\[1\].*segment_length=9.*dilation_rate=2.*16 tokens.*padding='masked'",
    ),
    (call(causal=1), TypeError, "^causal must be True or False.*got 1"),
    (call(causal=None), TypeError, "^causal must be True or False.*got None"),
    (call(causal=torch.tensor(True)), TypeError, "^causal must be True or False"),
    (call(dropout=1.0), ValueError, r"^dropout.*\[0, 1\).*got 1\.0"),
    (call(dropout=-0.1), ValueError, r"^dropout.*\[0, 1\).*got -0\.1"),
    (call(dropout=True), TypeError, "^dropout.*number.*got True"),
    (call(dropout="0.1"), TypeError, "^dropout.*number.*'0.1'"),
    (call(dropout=float("nan")), ValueError, "^dropout.*number.*nan"),
    (call(scale=float("nan")), ValueError, "^scale.*finite.*nan"),
    (call(scale=float("inf")), ValueError, "^scale.*finite.*inf"),
    (call(scale="auto"), ValueError, "^scale.*finite number or None.*'auto'"),
    (call(scale=True), ValueError, "^scale.*finite number or None.*True"),
    (call(engine="fast"), ValueError, "^engine must be one of.*auto, .*math.*'fast'"),
    (call(engine=None), ValueError, "^engine must be one of.*got None"),
    (
        call(engine="cudnn"),
        ValueError,
        "engine='cudnn' cannot serve.*runs on cuda, not on cpu.*Use engine='cpu_flash' or 'math'",
    ),
    (
        call(engine="sdpa", dropout=0.1),
        ValueError,
        "engine='sdpa' cannot serve.*cpu_flash has no attention dropout.*Use engine='math'",
    ),
    (call(is_causal=True), TypeError, "is_causal"),
    (lambda: dilated_attention(Q, Q, Q, PATTERN, True), TypeError, "positional"),
]

DOCUMENTS = [
    (call(lengths=16), TypeError, "^lengths must be an integer tensor or a list.*got 16"),
    (call(lengths="16"), TypeError, "^lengths must be an integer tensor or a list.*'16'"),
    (call(lengths=[8.0, 16.0]), TypeError, r"^lengths must hold integers.*8\.0"),
    (call(lengths=torch.ones(2)), TypeError, "^lengths must hold integers.*float32"),
    (call(lengths=torch.ones(2, 16, dtype=torch.bool)), TypeError, "^lengths.*integers.*bool"),
    (call(lengths=[16]), ValueError, r"^lengths.*one entry a sample.*\(2,\).*\(1,\)"),
    (call(lengths=INT32(8, 16)[None]), ValueError, r"^lengths.*one entry a sample.*\(1, 2\)"),
    (call(lengths=[8, 17]), ValueError, r"^lengths.*0\.\.16.*padded length.*8 to 17"),
    (call(lengths=[-1, 16]), ValueError, r"^lengths.*0\.\.16.*-1 to 16"),
    (call(ONE, lengths=[16], cu_seqlens=INT32(0, 16)), ValueError, "lengths.*or cu_seqlens.*not both"),
    (packed(1, 16), ValueError, r"^cu_seqlens must rise from 0.*\[1, 16\]"),
    (packed(0, 15), ValueError, r"^cu_seqlens.*number of tokens \(16\).*\[0, 15\]"),
    (packed(0, 17), ValueError, r"^cu_seqlens.*number of tokens \(16\).*\[0, 17\]"),
    (packed(0, 9, 7, 16), ValueError, r"^cu_seqlens must rise.*\[0, 9, 7, 16\]"),
    (packed(0, *range(10, 0, -1), 16), ValueError, r"^cu_seqlens must rise.*\[0, 10, 9, 8, \.\.\., 16\]"),
    (packed(0, 16, dtype=torch.int64), ValueError, r"^cu_seqlens.*int32.*\.to\('cpu', torch\.int32\)"),
    (call(ONE, cu_seqlens=INT32(0, 16).to("meta")), ValueError, "^cu_seqlens.*on the CPU.*on meta"),
    (packed(0, 16, dtype=torch.float32), TypeError, "^cu_seqlens must hold integers.*float32"),
    (call(ONE, cu_seqlens="0,16"), TypeError, "^cu_seqlens must be an integer tensor.*'0,16'"),
    (call(ONE, cu_seqlens=INT32(0, 16)[None]), ValueError, r"^cu_seqlens.*documents \+ 1,.*\(1, 2\)"),
    (packed(16), ValueError, r"^cu_seqlens.*at least \[0, N\].*\(1,\)"),
    (call(cu_seqlens=INT32(0, 16)), ValueError, "cu_seqlens.*batch of 1.*B=2.*pack them"),
]


@pytest.mark.parametrize(
    "run, error, message", [*TENSORS, *OPTIONS, *DOCUMENTS], ids=lambda x: x if isinstance(x, str) else ""
)
def test_misuse(run, error, message):
    with pytest.raises(error, match=message) as caught:
        run()
    assert type(caught.value) is error


ALLOWED = [
    {"scale": 1, "dropout": 0},
    {"lengths": [16, 0]},
    {"lengths": (16, 3)},
    {"lengths": INT32(16, 3)},
    {"lengths": torch.tensor([16, 3])},
    {"lengths": torch.tensor([16, 3], dtype=torch.uint8)},
]


@pytest.mark.parametrize("options", ALLOWED, ids=str)
def test_allowed(options):
    assert dilated_attention(Q, Q, Q, PATTERN, **options).isfinite().all()


def test_bounds_as_a_list():
    want = dilated_attention(ONE, ONE, ONE, PATTERN, cu_seqlens=INT32(0, 5, 16))
    assert torch.equal(dilated_attention(ONE, ONE, ONE, PATTERN, cu_seqlens=[0, 5, 16]), want)
