"""The kernels of the short convolution on a GPU: outputs and gradients equal torch in float64 and are reproducible."""

from dataclasses import replace

import pytest
import torch

from lightning_dilated import LongNetLM
from lightning_dilated.ext.convolution import convolution

from .cases import CASES, TOLERANCES, Case, compare, without_kernels

pytestmark = pytest.mark.gpu
MANY = {
    "as in a model": Case(5000, (768, 768, 768), batch=2),
    "centred, as in a model": Case(5000, (768, 768), causal=False, batch=2),
    "many documents": Case(20000, (256,), cuts=(0, *range(3, 20000, 7), 20000)),
    "centred, many documents": Case(3001, (192, 64), causal=False, cuts=(0, 1, 1, 64, 65, 3000, 3001)),
    "centred lengths": Case(1000, (128,), causal=False, batch=5, lengths=(1000, 999, 257, 1, 0)),
    "eight taps": Case(777, (64, 130), taps=8, batch=2),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", [*CASES, *MANY])
def test_equals_torch_in_float64(name, dtype):
    case = (CASES | MANY)[name]
    want = case.by_torch("cuda")
    for weights in {dtype, torch.float32}:
        got, again = (case.results(dtype, "cuda", weights) for _ in range(2))
        compare(got, want, dtype)
        assert all(torch.equal(again[name], x) for name, x in got.items())


@pytest.mark.parametrize("layout", ["joint", "apart", "turned"])
def test_any_strides(layout):
    case = replace(MANY["as in a model"], layout=layout)
    compare(case.results(torch.bfloat16, "cuda"), case.by_torch("cuda"), torch.bfloat16)


def test_rows_beyond_32_bits():
    """Rows have offsets of more than 2**31 elements."""
    tokens, channels = (1 << 20) + 3, 2304
    module = convolution.ShortConvolution(channels, 4, True, device="cuda")
    with torch.no_grad():
        module.weight.normal_().copy_(module.weight.to(torch.bfloat16))
    x = torch.randn(1, tokens, channels, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, last = module(x)[:, -50:], x[:, -53:].double()
        want = module.double()(last)[:, 3:]
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=4e-2)


def test_replayed_with_other_documents():
    """A replay of a CUDA graph reads the current bounds and lengths from the device."""
    for causal, name, values in (
        (True, "cu_seqlens", ((0, 9, 300), (0, 200, 300))),
        (False, "lengths", ((300,), (70,))),
    ):
        module = Case(300, (64,), causal=causal).module(torch.float32, "cuda")
        (x,) = Case(300, (64,)).parts(torch.float32, "cuda")
        x.requires_grad_()
        first, second = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in values)
        read = first.clone()

        def run(documents, module=module, x=x, name=name):
            y = module(x, **{name: documents})
            return y, *torch.autograd.grad(y.square().sum(), (x, module.weight))

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run(read)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(read)
        for documents in (first, second):
            read.copy_(documents)
            graph.replay()
            torch.cuda.synchronize()
            for got, want in zip(results, run(documents), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["kv_conv", "recurrence"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_in_a_model(kind, compiled):
    """In a model, loss and gradients in float32 are the same with and without the kernels."""
    options = {"kv_conv": {"kv_conv": 4}, "recurrence": {"recurrence": {"kind": "linear", "segment": 64}}}[kind]
    tokens = torch.randint(64, (2, 1000), generator=torch.Generator().manual_seed(1)).cuda()

    def loss_and_gradients(compiled):
        torch.manual_seed(0)
        model = LongNetLM({"hybrid": {"local": 128, "global_every": 2}}, 64, 256, 2, 4, num_kv_heads=2, max_seq_len=4096,
                          compile_blocks=compiled, **options)  # fmt: skip
        model.configure_model()
        for name, p in model.named_parameters():
            if "conv" in name:
                torch.nn.init.normal_(p, std=0.3)
        model.cuda()
        total, _ = model.loss_terms({"tokens": tokens, "labels": tokens})
        return [x.detach().double() for x in (total, *torch.autograd.grad(total, list(model.parameters())))]

    got = loss_and_gradients(compiled)
    with without_kernels():
        want = loss_and_gradients(False)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5 * float(y.abs().max()))
