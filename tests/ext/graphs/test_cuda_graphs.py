"""Replayed training steps of a stack against plain steps. On the CPU, functions replace CUDA graphs."""

import copy
import logging
import pickle

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_dilated as ld
from lightning_dilated.ext._compat.torch import recording
from lightning_dilated.ext.graphs import cuda_graphs
from lightning_dilated.ext.graphs.cuda_graphs import CudaGraphs, Recorded, padded_length, padded_to
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.documents import Documents
from lightning_dilated.models.transformer import DilatedTransformer, Inputs

from ...models import trainer

PATTERN = ld.DilatedPattern([(16, 1), (40, 3)])


def rerun(compute, inputs, parameters, shared):
    """Return a record with replays that write to the same tensors, like a CUDA graph's, but compute again in Python."""
    x = inputs.x

    def computed():
        """Compute with the padding as an additional document, because on the CPU bounds must end with the row."""
        copies = [None if value is None else value.clone() for value in inputs[1:]]
        if copies[1] is not None:
            copies[1] = torch.cat([copies[1], torch.tensor([x.shape[1]], dtype=torch.int32)])
        return compute(Inputs(x, *copies))

    trained = [*([x] if x.requires_grad else []), *parameters]
    out = torch.full_like(x, torch.nan)
    grad, x_grad = torch.zeros_like(out), torch.full_like(out, torch.nan) if x.requires_grad else None
    outputs, grads = [], torch.autograd.grad(computed().sum(), trained, allow_unused=True)
    used = tuple(g is not None for g in grads[len(grads) - len(parameters) :])

    def forward():
        with torch.enable_grad():
            outputs[:] = [computed()]
        out.copy_(outputs[0].detach())

    def backward():
        got_grads = torch.autograd.grad(outputs[0], trained, grad, allow_unused=True)
        if x_grad is not None:
            x_grad.copy_(got_grads[0])
        for to, value in zip(shared.grads, got_grads[len(got_grads) - len(parameters) :], strict=True):
            to.copy_(torch.nan if value is None else value)

    return Recorded(inputs, out, grad, x_grad, used, forward, backward)


def shape_of(inputs):
    """Return the shape of the hidden states, and for packed rows also the number of documents in the record."""
    return (*inputs.x.shape, *([] if inputs.cu_seqlens is None else [len(inputs.cu_seqlens) - 1]))


@pytest.fixture
def replayed(monkeypatch):
    """Record on the CPU as well. Return the list of shapes that are recorded."""
    shapes = []
    monkeypatch.setattr(
        cuda_graphs,
        "record",
        lambda compute, inputs, *args: shapes.append(shape_of(inputs)) or rerun(compute, inputs, *args),
    )
    real = CudaGraphs.why_not
    monkeypatch.setattr(
        CudaGraphs, "why_not", lambda *call_args: None if (why := real(*call_args)) == "it runs on cpu" else why
    )
    return shapes


def stack(causal=False, **options):
    torch.manual_seed(0)
    options = ld.models.blocks.BlockOptions(**options)
    model = DilatedTransformer(16, [PATTERN, PATTERN.shifted()], 2, causal=causal, options=options).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def pair(model, lengths, tokens, batch=2, **how):
    """Return the result and all gradients of a plain step and of a replayed step."""
    x = torch.randn(batch, tokens, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    lengths, results, options = None if lengths is None else torch.tensor(lengths), [], how.get("options", {})
    for graphs in (None, model.__dict__.setdefault("_kept", CudaGraphs(0.125))):
        model.graphs = graphs
        model.zero_grad()
        leaf = x.clone().requires_grad_(how.get("input_grad", True))
        torch.manual_seed(1)
        out = model(leaf, lengths=lengths, **options)
        out.square().sum().backward()
        results.append(
            [out.detach(), *([leaf.grad] if leaf.requires_grad else []), *(p.grad.clone() for p in model.parameters())]
        )
    return results


def same(want, got, tol=1e-12):
    for a, b in zip(want, got, strict=True):
        assert (a - b).abs().max() <= tol * a.abs().max().clamp(min=1)


def messages(caplog):
    """Return the log messages of cuda_graphs."""
    return [r.getMessage() for r in caplog.records if r.name == cuda_graphs.__name__]


def test_padded_lengths():
    assert [padded_length(n, 0.125) for n in (1, 64, 65, 500, 513, 10000)] == [64, 64, 128, 512, 576, 10368]
    for most in (0.0, 0.05, 0.5):
        lengths = [padded_length(n, most) for n in range(1, 5000)]
        assert all(n <= x and (x - n < 64 or x < n * (1 + most)) for n, x in enumerate(lengths, 1))
    assert len({padded_length(n, 0.125) for n in range(500, 10001)}) < 31


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_batches(replayed, causal, caplog):
    """A few records serve many lengths in any order. The log contains the share of padding."""
    model, sizes = stack(causal), (50, 64, 33, 90, 17, 100, 64, 128, 70)
    with caplog.at_level(logging.INFO, cuda_graphs.__name__):
        for tokens in sizes:
            same(*pair(model, (tokens, tokens // 2 + 1), tokens))
    assert replayed == [(2, 64, 16), (2, 128, 16)]
    assert (model.graphs.tokens, model.graphs.padded) == (2 * sum(sizes), 2 * (5 * 64 + 4 * 128))
    # padding: 64 / 50, then (3 * 64 + 128) / (50 + 64 + 33 + 90)
    assert messages(caplog) == [
        "recorded CUDA graphs of 2 x 64 tokens (1 of them); padding so far is 28.0 % of the tokens",
        "recorded CUDA graphs of 2 x 128 tokens (2 of them); padding so far is 35.0 % of the tokens",
    ]


def test_sequences_without_lengths_are_not_padded(replayed):
    model = stack(True, kv_conv=4)
    same(*pair(model, None, 50))
    same(*pair(model, None, 50, input_grad=False))
    same(*pair(model, None, 51, batch=1))
    assert replayed == [(2, 50, 16), (2, 50, 16), (1, 51, 16)]


def test_stochastic_depth(replayed):
    same(*pair(stack(drop_path=0.5), (40, 30), 40))


PACKED = [(50, (0, 20, 50)), (64, (0, 0, 9, 30, 64)), (33, (0, 33)), (61, (0, 1, 2, 3, 61)), (90, (0, 5, 6, 7, 40, 90))]


@pytest.mark.parametrize("options", [{"kv_conv": 3}, {"drop_path": 0.5}])
def test_packed_rows(replayed, options):
    """A few records serve rows with any documents, including positions that restart and documents that are dropped."""
    model = stack(True, **options)
    for tokens, bounds in PACKED:
        bounds = torch.tensor(bounds, dtype=torch.int32)
        packed = {"cu_seqlens": bounds, "positions": Documents.of(bounds, tokens).position}
        same(*pair(model, None, tokens, batch=1, options=packed))
    assert replayed == [(1, 64, 16, 4), (1, 128, 16, 8)]


def test_bounds_are_checked_before_a_replay(replayed):
    model = stack()
    model.graphs = CudaGraphs(0.1)
    x = torch.ones(1, 20, 16, dtype=torch.float64)
    model(x, cu_seqlens=torch.tensor([0, 7, 20], dtype=torch.int32)).sum().backward()
    for bounds, what in (
        ([0, 21], "rise from 0 to the number of tokens"),
        ([0, 9, 8, 20], "rise from 0"),
        ([0], r"\(documents \+ 1,\)"),
    ):
        with pytest.raises(ValueError, match=what):
            model(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(ValueError, match="a batch of 1, got B=2"):
        model(x.expand(2, -1, -1), cu_seqlens=torch.tensor([0, 20], dtype=torch.int32))
    assert replayed == [(1, 64, 16, 4)]


def test_what_the_device_holds_counts_up_to_the_tokens():
    """A record has more tokens than the sequence: lengths beyond N or below 0 are clipped, as in eager kernels."""
    x, beyond = torch.ones(1, 20, 4), 2**32 + 3
    assert padded_to(Inputs(x, torch.tensor([beyond])), 64).lengths.tolist() == [20]
    assert padded_to(Inputs(x, torch.tensor([-beyond])), 64).lengths.tolist() == [0]
    bounds = torch.tensor([-1, 7, 30], dtype=torch.int32)
    assert padded_to(Inputs(x, cu_seqlens=bounds), 64).cu_seqlens.tolist() == [0, 7, 20, 20, 20]


def test_bounds_in_a_list(replayed):
    model, x = stack(), torch.randn(1, 20, 16, dtype=torch.float64)
    want = model(x, cu_seqlens=[0, 7, 20])
    model.graphs = CudaGraphs(0.1)
    same([want], [model(x, cu_seqlens=[0, 7, 20])])
    assert replayed == [(1, 64, 16, 4)]


def test_wrong_positions(replayed):
    """Positions of a wrong shape raise before they are copied into the memory of a record."""
    model, x = stack(True), torch.randn(2, 20, 16, dtype=torch.float64)
    model.graphs = CudaGraphs(0.1)
    model(x, positions=torch.arange(20).expand(2, -1)).sum().backward()
    for wrong in (torch.arange(20)[None], torch.arange(21).expand(2, -1), torch.arange(19)):
        with pytest.raises(ValueError, match="positions must be"):
            model(x, positions=wrong)


def test_positions_of_each_sample(replayed):
    model, places = stack(True), torch.arange(40).expand(2, -1) + torch.tensor([[0], [3]])
    same(*pair(model, None, 40, options={"positions": places}))
    same(*pair(model, (40, 7), 40, options={"positions": places}))
    assert replayed == [(2, 40, 16), (2, 64, 16)]
    xpos = stack(True, position_encoding="xpos")
    xpos.graphs = CudaGraphs(0.1)
    xpos(torch.ones(2, 40, 16, dtype=torch.float64), positions=places)
    assert len(replayed) == 2 and "xPos" in next(iter(xpos.graphs._said))


def test_gradients_accumulate(replayed):
    """A replay does not overwrite gradients that are accumulated for an optimizer."""
    model = stack()
    totals = []
    for graphs in (None, CudaGraphs(0.1)):
        model.graphs = graphs
        model.zero_grad()
        for tokens in (40, 30, 90):
            x = torch.ones(1, tokens, 16, dtype=torch.float64) * tokens / 50
            model(x, lengths=torch.tensor([tokens - 3])).sum().backward()
        totals.append([p.grad.clone() for p in model.parameters()])
    same(*totals)


def test_a_parameter_without_a_gradient(replayed):
    """A parameter without a gradient keeps `grad` None, so that an optimizer skips it."""
    model = stack()
    model.blocks[0].extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.graphs = CudaGraphs(0.1)
    model(torch.ones(1, 20, 16, dtype=torch.float64)).sum().backward()
    assert model.blocks[0].extra.grad is None and model.blocks[0].ffn.fc1.weight.grad is not None


def test_a_second_forward_before_the_backward_is_computed_plainly(replayed):
    model = stack()
    model.graphs = CudaGraphs(0.1)
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    first, second = model(x), model(2 * x)
    assert "Replay" in first.grad_fn.next_functions[0][0].name() or len(replayed) == 1
    (first.sum() + second.sum()).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.graphs = None
    (model(x).sum() + model(2 * x).sum()).backward()
    same([p.grad for p in model.parameters()], got)
    model.graphs = graphs = CudaGraphs(0.1)
    del first, second
    for _ in range(3):  # three forwards without a backward
        model(x)
    assert graphs._turn == 3


def test_a_late_backward_is_an_error(replayed):
    model = stack()
    model.graphs = CudaGraphs(0.1)
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    first = model(x).sum()
    first.backward(retain_graph=True)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"after another forward of the same stack.*or set cuda_graphs=False"):
        first.backward()


def test_changed_weights_are_recorded_again(replayed):
    model = stack()
    same(*pair(model, (20,), 20, batch=1))
    next(model.parameters()).requires_grad_(False)
    model.blocks[1].ffn.fc1.weight = nn.Parameter(model.blocks[1].ffn.fc1.weight.detach() * 2)
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    out = model(x)
    model.graphs = None
    same([model(x)], [out])
    assert len(replayed) == 2


def test_a_shared_parameter(replayed):
    """The gradient of a shared parameter is the sum over its uses."""
    model = stack()
    model.blocks[1].ffn.fc1.weight = model.blocks[0].ffn.fc1.weight
    same(*pair(model, None, 20))


@pytest.mark.parametrize("name", ["mode", "p", "pattern", "deterministic"])
def test_what_a_replay_would_not_see(replayed, monkeypatch, name):
    """If a module's mode, its settings or a setting of torch changes, the step is recorded again."""
    model = stack(dropout=0.5)
    model.graphs, x = CudaGraphs(0.1), torch.randn(1, 20, 16, dtype=torch.float64)
    model(x).sum().backward()
    if name == "mode":
        model.blocks[0].eval()
    elif name == "p":
        model.blocks[0].dropout.p = 0.0
    elif name == "pattern":
        model.blocks[0].attention.attention.pattern = PATTERN.shifted()
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    model(x).sum().backward()
    assert len(replayed) == 2


def test_a_second_backward_is_an_error(replayed):
    model = stack()
    model.graphs = CudaGraphs(0.1)
    loss = model(torch.randn(1, 20, 16, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"comes a second time.*set cuda_graphs=False"):
        loss.backward()


@pytest.mark.parametrize("by", ["torch.autograd.grad", ".grad", "a view"])
def test_gradients_that_users_hold(replayed, by):
    """If a user keeps a backward's gradients, the next backward does not change them, and has right gradients itself."""
    model, held = stack(), []
    x, weights = torch.randn(1, 20, 16, dtype=torch.float64), list(model.blocks.parameters())
    for graphs in (None, CudaGraphs(0.1)):
        model.graphs = graphs
        grads = []
        for factor in (1, 3, 5):
            loss = model(factor * x).square().sum()
            if by == "torch.autograd.grad":
                grads += torch.autograd.grad(loss, weights)
            else:
                model.zero_grad()
                loss.backward()
                grads += [p.grad if by == ".grad" else p.grad.view(-1) for p in weights]
        held.append(grads)
    same(*held)


def test_a_fit_frees_them(replayed, caplog):
    """A fit frees the memory of its records, and logs its share of padding once."""
    model = ld.LongNetLM(PATTERN, 16, 16, 1, 2, max_seq_len=64, cuda_graphs=True)
    tokens = torch.arange(40)[None] % 16
    data = [{"tokens": tokens, "labels": tokens}] * 2
    with caplog.at_level(logging.INFO, cuda_graphs.__name__):
        trainer(max_steps=2).fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    graphs = model.transformer.graphs
    assert messages(caplog)[1:] == ["CUDA graphs replayed 80 tokens; padding was 0.0 % of them"]
    assert replayed == [(1, 40, 16)] and graphs._turn == 2 and not graphs._records and not graphs._shared.grads
    packed = {"tokens": tokens, "labels": tokens, "cu_seqlens": torch.tensor([0, 30, 40], dtype=torch.int32)}
    with caplog.at_level(logging.INFO, cuda_graphs.__name__):
        model.loss_terms(packed)[0].backward()
        assert len(graphs._records) == 1
        graphs.free()
        graphs.free()
    assert messages(caplog)[3:] == ["CUDA graphs replayed 40 tokens; padding was 60.0 % of them"]


def test_lengths_are_checked(replayed):
    """Lengths are checked as without graphs, although a record has more tokens."""
    model, x = stack(), torch.randn(2, 20, 16, dtype=torch.float64)
    want = model(x, lengths=[20, 7])
    model.graphs = CudaGraphs(0.1)
    same([want], [model(x, lengths=[20, 7])])
    for wrong, message in (
        ([21, 3], r"0\.\.20 .* from 3 to 21"),
        ([-1, 3], "from -1 to 3"),
        ([20], "one entry a sample"),
    ):
        with pytest.raises(ValueError, match=message):
            model(x, lengths=torch.tensor(wrong))


def test_within_a_checkpoint(replayed, caplog):
    """A checkpoint's forward is not recorded, because the record would contain the checkpoint's hooks on tensors."""
    model, x = stack(), torch.randn(1, 20, 16, dtype=torch.float64, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.graphs = CudaGraphs(0.1)
    with caplog.at_level(logging.WARNING):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    same(want, [p.grad for p in model.parameters()])
    assert replayed == [] and "a checkpoint or an offload" in caplog.text


def test_where_nothing_is_replayed(replayed, caplog):
    """If graphs cannot be used, the reason is logged once, and the step is computed without graphs."""
    model, x = stack(), torch.randn(1, 20, 16, dtype=torch.float64)
    model.graphs = CudaGraphs(0.1)
    with torch.no_grad():
        want = model(x)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            same([want], [model(x, watch=lambda x: None)])
        model.memory = MemorySettings("block")
        same([want], [model(x)])
        model.memory = MemorySettings()
        hook = model.blocks[0].register_forward_hook(lambda *args: None)
        same([want], [model(x)])
        hook.remove()
    assert replayed == []
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and "it is called with watch" in said[0] and "memory settings" in said[1]
    assert "a module of it has hooks" in said[2]


def test_a_shape_that_cannot_be_recorded(replayed, monkeypatch, caplog):
    """If one shape cannot be recorded, it is computed without graphs, with one message. Other shapes are recorded."""
    recording = cuda_graphs.record

    def record(compute, inputs, *args):
        if inputs.x.shape[1] == 128:
            raise ValueError("no kernel reads these lengths")
        return recording(compute, inputs, *args)

    monkeypatch.setattr(cuda_graphs, "record", record)
    model = stack()
    with caplog.at_level(logging.WARNING):
        for tokens in (100, 40, 101):
            same(*pair(model, (tokens, tokens - 1), tokens))
    assert replayed == [(2, 64, 16)]
    assert [r.getMessage() for r in caplog.records] == [
        "CUDA graphs are not used for a stack, since 2 x 128 tokens cannot be recorded: no kernel reads these lengths."
    ]


def test_copies_record_for_themselves():
    graphs = CudaGraphs(0.2)
    graphs._records[1] = 2
    for other in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):
        assert (other.padding, len(other._records)) == (0.2, 0)


def test_options_of_models():
    model = ld.SlideEncoder(8, 16, 1, 2, task="classification", num_classes=2, cuda_graphs=True, graph_padding=0.5)
    model.configure_model()
    assert model.transformer.graphs.padding == 0.5 and "cuda_graphs" not in model.hparams
    with pytest.raises(ValueError, match="graph_padding must"):
        ld.LongNetLM(PATTERN, 16, 16, 1, 2, max_seq_len=64, graph_padding=2)
    with pytest.raises(ValueError, match=r"cuda_graphs cannot record attention_dropout=0.1"):
        ld.LongNetLM(PATTERN, 16, 16, 1, 2, max_seq_len=64, cuda_graphs=True, attention_dropout=0.1)


# -- a GPU -------------------------------------------------------------------------------------------------------------
def gradients_of(model, batches, autocast=True):
    """Return, for each batch, all gradients at the current weights as one vector."""
    vectors = []
    for batch in batches:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total, count = model.loss_terms(batch)
        (total / count).backward()
        vectors.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    return vectors


def losses_of(model, batches, steps=2, lr=1e-3, autocast=True):
    """Train with AdamW for several steps. Return (losses, parameters)."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr, fused=True), []
    for batch in batches * steps:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total, count = model.loss_terms(batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / count))
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_slides_on_a_gpu(compiled):
    """Twenty lengths with GigaPath's pattern and attended padding: gradients and losses are as without graphs.

    A block compiled for one length rounds differently from a block compiled for any length. Both are compared with
    fp32: with graphs, the error is at most twice the error without graphs.
    """
    lengths = [200, 1000, 777, 345, 512, 903, 640, 288, 430, 555, 801, 210, 666, 999, 321, 456, 789, 222, 611, 940]
    batches = []
    for i, tiles in enumerate(lengths):
        features, coords = torch.zeros(1, tiles + 1, 64), torch.full((1, tiles + 1, 2), -1)
        features[:, 1:].normal_(generator=torch.Generator().manual_seed(i))
        coords[0, 1:] = 256 * torch.stack([torch.arange(tiles) % 50, torch.arange(tiles) // 50], 1)
        label = torch.tensor([i % 2]).cuda()
        batches.append(
            {"features": features.cuda(), "coords": coords.cuda(), "lengths": torch.tensor([tiles + 1]), "label": label}
        )
    results = []
    for precision, graphs in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        torch.manual_seed(0)
        half = precision == "bfloat16"
        model = ld.SlideEncoder(
            64, 128, 3, 4, task="classification", num_classes=2, dropout=0.0, drop_path=0.0, padding="attended",
            segment_lengths=[128, 256, 512], dilation_rates=[1, 2, 4], compile_blocks=compiled and half, cuda_graphs=graphs,
        )  # fmt: skip
        model.configure_model()
        # at a rate of 1e-3, with one slide per step, the loss would rise, and with it bfloat16's differences
        gradients = gradients_of(model.cuda(), batches, autocast=half)
        results.append((gradients, losses_of(model, batches, lr=1e-4, autocast=half)[0]))
    assert len(model.transformer.graphs._records) > 5 and not model.transformer.graphs._said
    distance = [lambda a, b: float((a - b).norm() / b.norm()), lambda a, b: abs(a - b)]  # of gradients, of losses
    for far, tolerance, runs in zip(distance, (2e-2, 5e-3), zip(*results, strict=True), strict=True):
        exact, plain, replayed = runs
        errors, replay_errors = ([far(a, b) for a, b in zip(x, exact, strict=True)] for x in (plain, replayed))
        assert all(x < 3e-2 for x in errors)
        assert all(x < max(2 * max(errors), tolerance) for x in replay_errors)
        assert compiled or all(far(a, b) < tolerance for a, b in zip(replayed, plain, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_text_on_a_gpu(compiled):
    batches = []
    for i in range(3):
        text = torch.randint(0, 256, (2, 1000), generator=torch.Generator().manual_seed(i)).cuda()
        batches.append({"tokens": text, "labels": text.roll(-1, 1)})
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = ld.LongNetLM(
            ld.DilatedPattern.hybrid(4, 4, local=256), 256, 128, 4, 4, max_seq_len=1000, kv_conv=4,
            compile_blocks=compiled, cuda_graphs=graphs,
        )  # fmt: skip
        model.configure_model()
        results.append(losses_of(model.cuda(), batches, 5))
    assert len(model.transformer.graphs._records) == 1
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-2) and results[0][0][-1] < results[0][0][0] - 0.05


@pytest.mark.gpu
def test_a_fit_on_a_gpu_with_dropout_and_accumulation():
    """With ring_dilated on one device, a fit learns, and dropout masks differ from step to step."""
    torch.manual_seed(0)
    model = ld.LongNetLM(
        ld.DilatedPattern.geometric(64, 512), 16, 64, 2, 4, max_seq_len=512, dropout=0.1, cuda_graphs=True
    )
    text = torch.arange(512).repeat(4, 1) % 7
    batches = [{"tokens": text, "labels": text.roll(-1, 1)}] * 40
    trainer = pl.Trainer(
        strategy="ring_dilated", accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=1, logger=False,
        accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    assert float(trainer.callback_metrics["train_loss"]) < 1.5
    graphs = model.transformer.graphs
    assert graphs._turn == 40 and not graphs._said and not graphs._records  # the end of a fit frees the records
    x = torch.randn(1, 512, 64, device="cuda", requires_grad=True)
    model.cuda().train()
    outs = []
    for _ in range(2):
        outs.append(model.transformer(x))
        outs[-1].sum().backward()
    assert not torch.equal(*outs)


@pytest.mark.gpu
def test_held_gradients_and_shared_weights_on_a_gpu():
    model, held = stack(), []
    model.blocks[1].ffn.fc1.weight = model.blocks[0].ffn.fc1.weight
    model.float().cuda()
    x, weights = torch.randn(1, 64, 16, device="cuda"), list(model.blocks.parameters())
    for graphs in (None, CudaGraphs(0.1)):
        model.graphs, grads = graphs, []
        for factor in (1.0, 3.0, 5.0):
            grads += torch.autograd.grad(model(factor * x).square().sum(), weights)
        held.append(grads)
    assert len(model.graphs._records) == 1 and model.graphs._turn == 3
    for a, b in zip(*held, strict=True):
        assert (a - b).norm() <= 1e-3 * a.norm()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="comes a second time"):
        loss.backward()


@pytest.mark.gpu
def test_the_op_is_captured_with_lengths():
    """A forward and backward of the op are recorded once and replayed with twenty lengths, against the oracle."""
    from lightning_dilated.attention.oracle import oracle

    pattern = ld.DilatedPattern([(64, 1), (256, 4)], padding="attended")
    q, k, v, grad = (torch.randn(2, 300, 4, 32, device="cuda", requires_grad=i < 3) for i in range(4))
    lengths = torch.tensor([300, 300], dtype=torch.int32, device="cuda")

    def run():
        out = ld.dilated_attention(q, k, v, pattern, lengths=lengths)
        return *torch.autograd.grad(out, (q, k, v), grad), out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        *grads, out = run()
    for i in range(20):
        lengths.copy_(torch.tensor([15 * i + 5, 300 - 14 * i]))
        graph.replay()
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want, _ = oracle(*exact, pattern, lengths=lengths.cpu())
        want_grads = torch.autograd.grad(want, exact, grad.double())
        for a, b in zip((want, *want_grads), (out, *grads), strict=True):
            assert (a - b).abs().max() < 2e-2 * a.abs().max().clamp(min=1)


def packings(tokens, most, number):
    """Draw bounds of up to `most` documents. Some documents are empty. Some rows have tokens after the last document."""
    generator = torch.Generator().manual_seed(number)
    stop = tokens if number % 2 else int(torch.randint(tokens // 2, tokens, (), generator=generator))
    cuts = torch.randint(0, stop + 1, (int(torch.randint(0, most, (), generator=generator)),), generator=generator)
    bounds = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([stop])])
    return bounds.int()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        ld.DilatedPattern([(64, 1), (256, 4)], padding="attended"),
        ld.DilatedPattern([ld.Branch(64, 1, 32), ld.Branch(300, 7, 11), (None, 3)]),
        ld.DilatedPattern([ld.Window(70), ld.Window(20, 3, heads=[0, 4]), (64, 2)]),
    ],
)
def test_the_op_is_captured_with_documents(pattern, causal):
    """A forward and backward, recorded once and replayed with twenty packings, against the oracle and host bounds."""
    from lightning_dilated.attention.oracle import oracle

    tokens, heads = 500, (6, 2)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    q, k, v, grad = (torch.randn(1, tokens, n, 32, device="cuda", requires_grad=i < 3) for i, n in enumerate(sizes))
    bounds = torch.tensor([0, *[tokens] * 16], dtype=torch.int32, device="cuda")

    def run():
        out = ld.dilated_attention(q, k, v, pattern, causal=causal, cu_seqlens=bounds, engine="triton")
        return *torch.autograd.grad(out, (q, k, v), grad), out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        *grads, out = run()
    for i in range(20):
        some = packings(tokens, 16, i)
        n = int(some[-1])
        bounds.copy_(torch.cat([some, some[-1:].expand(17 - len(some))]))
        graph.replay()
        got = [x.clone() for x in (out, *grads)]
        plain = [x.detach()[:, :n].requires_grad_() for x in (q, k, v)]
        eager = ld.dilated_attention(*plain, pattern, causal=causal, cu_seqlens=some, engine="triton")
        eager = (eager, *torch.autograd.grad(eager, plain, grad[:, :n]))
        exact = [x.detach()[:, :n].double().requires_grad_() for x in (q, k, v)]
        want, _ = oracle(*exact, pattern, causal=causal, cu_seqlens=some)
        expected = (want, *torch.autograd.grad(want, exact, grad[:, :n].double()))
        for a, b, c in zip(expected, eager, got, strict=True):
            assert (a - c[:, :n]).abs().max() < 1e-4 * a.abs().max().clamp(min=1)
            assert (b - c[:, :n]).abs().max() < 1e-4 * a.abs().max().clamp(min=1)
            assert (c[:, n:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_rows_on_a_gpu(compiled):
    """A few records serve twenty rows of documents, with the losses and weights of a run without graphs."""
    batches = []
    for i in range(20):
        bounds = packings(900 - 20 * i, 12, i)
        text = torch.randint(0, 256, (1, int(bounds[-1])), generator=torch.Generator().manual_seed(i)).cuda()
        batches.append({"tokens": text, "labels": text.roll(-1, 1), "cu_seqlens": bounds})
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = ld.LongNetLM(
            ld.DilatedPattern.geometric(64, 512), 256, 128, 3, 4, max_seq_len=1000, kv_conv=3,
            compile_blocks=compiled, cuda_graphs=graphs,
        )  # fmt: skip
        model.configure_model()
        torch.manual_seed(1)
        results.append(losses_of(model.cuda(), batches))
    records = model.transformer.graphs._records
    assert 1 < len(records) < 20 and not model.transformer.graphs._said
    assert results[0][0] == pytest.approx(results[1][0], abs=2e-2)
    for a, b in zip(*(x[1] for x in results), strict=True):
        assert (a - b).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
def test_reduce_overhead(whole):
    """torch.compile's own CUDA graphs work on blocks and on a whole model, and Inductor skips none of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = ld.LongNetLM(ld.DilatedPattern.geometric(64, 512), 256, 64, 2, 4, max_seq_len=512)
    model.configure_model()
    model.cuda()
    text = torch.randint(0, 256, (2, 512), device="cuda")
    want = model(text)
    grads = torch.autograd.grad(want.square().mean(), list(model.parameters()))
    if whole:
        call = torch.compile(lambda x: model(x), mode="reduce-overhead")
    else:
        call = model
        for block in model.transformer.blocks:
            block.compile(mode="reduce-overhead")
    torch.backends.cuda.matmul.allow_tf32 = False
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = call(text)
        got_grads = [x.clone() for x in torch.autograd.grad(out.square().mean(), list(model.parameters()))]
    assert (out - want).abs().max() < 1e-3 * want.abs().max()
    for a, b in zip(grads, got_grads, strict=True):
        assert (a - b).norm() <= 1e-3 * a.norm()
    inductor = torch._dynamo.utils.counters["inductor"]
    assert inductor and not inductor["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True])
def test_graphs_keep_their_workspaces(own):
    """Lightning's Trainer frees cuBLAS's workspaces when it starts. Later replays must not write to that memory.

    Graphs that torch alone records do write there, which shows that these products use workspaces. If this assertion
    fails, torch stores workspaces elsewhere. In this case check whether `recording` still has to clear them.
    """
    torch._C._cuda_clearCublasWorkspaces()
    pairs = [
        [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, n), (n, m))]
        for m, n in ((64, 65536), (256, 16384), (768, 10240))
    ]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    run = lambda: [a @ b for a, b in pairs]  # noqa: E731
    stream.wait_stream(torch.cuda.current_stream())  # wait for the inputs
    with torch.cuda.stream(stream):
        want = run()
    torch.cuda.synchronize()
    with recording(graph, stream) if own else torch.cuda.graph(graph, stream=stream):
        out = run()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(stream):
        run()  # this stream allocates a workspace, as for any product
        assert (torch.cuda.memory_allocated() > before) == own
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        size = before - torch.cuda.memory_allocated()
        fillers = [torch.full((size,), 77, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert size > 0 and all(map(torch.equal, out, want))
    assert all(bool((x == 77).all()) for x in fillers) == own
