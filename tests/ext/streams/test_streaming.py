"""Models on sequences in chunks: losses, gradients and trained weights equal one pass."""

import copy
import pickle
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.ext.streams import chunk_call
from lightning_dilated.ext.streams import losses as streamed
from lightning_dilated.ext.streams.training import streamed_sum
from lightning_dilated.memory.settings import MemorySettings

from ...models import trainer

GEOMETRIC = ld.DilatedPattern.longnet([8, 16, 32, 64], [1, 2, 4, 8])
VOCABULARY = 32


def lm(pattern=GEOMETRIC, seed=0, **options):
    """Build a float64 LongNetLM in which attention strongly affects the loss."""
    torch.manual_seed(seed)
    model = ld.LongNetLM(pattern, VOCABULARY, **{"dim": 16, "depth": 3, "num_heads": 4, "max_seq_len": 64} | options)
    model.configure_model()
    for p in model.double().parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.3)
    for scale in (p for name, p in model.named_parameters() if name.endswith("recurrence.scale")):
        torch.nn.init.normal_(scale)  # open the gates, which are closed at first
    return model


def text(tokens=64, batch=1, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, 3::7] = -100
    return {"tokens": tokens, "labels": labels, **options}


def gradients(model, batch, **settings):
    """Return (loss, {name: gradient}) of a training step."""
    model.transformer.memory = MemorySettings(**settings)
    model.zero_grad()
    torch.manual_seed(3)
    total, count = model.loss_terms(batch)
    (total / count).backward()
    return total.detach() / count, {name: p.grad.clone() for name, p in model.named_parameters()}


PACKED = {"cu_seqlens": torch.tensor([0, 5, 14, 30, 64], dtype=torch.int32)}
SHORT_PACKED = {"cu_seqlens": torch.tensor([0, 13, 20, 61], dtype=torch.int32)}
PADDED = {"lengths": torch.tensor([40, 64])}
HYBRID = ld.DilatedPattern.hybrid(3, 4, local=8, global_every=2)
CASES = {
    "plain": ({}, {}, text(), 16),
    "not a multiple": ({}, {}, text(61), 13),
    "chunks of one token": ({}, {}, text(17), 1),
    "longer than the text": ({}, {}, text(), 100),
    "shifted layers": ({"pattern": [GEOMETRIC, GEOMETRIC.shifted()]}, {}, text(61), 13),
    "dense heads": ({"pattern": HYBRID}, {}, text(), 10),
    "dense heads without positions": (
        {"pattern": HYBRID, "global_rotary": False},
        {"policy": "block", "head_chunks": 2},
        text(61),
        13,
    ),
    "grouped heads, padded": ({"num_kv_heads": 2}, {}, text(batch=2, **PADDED), 16),
    "packed": ({}, {}, text(**PACKED), 10),
    "attention dropout": ({"attention_dropout": 0.2}, {}, text(), 16),
    "convolution": ({"kv_conv": 4}, {}, text(), 16),
    "convolution, short chunks": ({"kv_conv": 4}, {}, text(17), 2),
    "convolution, packed": ({"kv_conv": 4}, {"policy": "block"}, text(**PACKED), 13),
    "block": ({}, {"policy": "block"}, text(), 16),
    "attention-kept": ({"kv_conv": 3}, {"policy": "attention-kept"}, text(), 16),
    "everything": ({}, {"policy": "block", "every": 2, "offload": 1.0, "tile": 8, "head_chunks": 2}, text(), 16),
    "heads, dropout": ({"attention_dropout": 0.2}, {"policy": "block", "head_chunks": 4}, text(), 16),
    "frozen embedding": ({}, {}, text(), 16),
    "recurrence": ({"recurrence": {"kind": "gated_delta"}, "num_kv_heads": 2}, {}, text(61, batch=2), 16),
    "recurrence, packed": (
        {"recurrence": {"kind": "gated_delta"}, "kv_conv": 3},
        {"policy": "block"},
        text(**PACKED),
        13,
    ),
    "recurrence, a document begins with a chunk": ({"recurrence": {}}, {}, text(61, **SHORT_PACKED), 13),
    "recurrence, padded": (
        {"recurrence": [None, {"conv": 0}]},
        {"policy": "attention-kept"},
        text(batch=2, **PADDED),
        10,
    ),
    "recurrence, linear": ({"recurrence": {"kind": "linear", "segment": 5}}, {}, text(61, **SHORT_PACKED), 13),
    "recurrence, delta": ({"recurrence": {"kind": "delta", "segment": 6, "conv": 2}}, {"policy": "block"}, text(), 10),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_pass(name):
    options, settings, batch, chunk = CASES[name]
    model = lm(**options)
    if name == "frozen embedding":
        model = lm(**options, tie_embeddings=False)
        model.embedding.requires_grad_(False)
        model.transformer.blocks[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        total, _ = model.loss_terms(batch)
        want = torch.autograd.grad(total, trained)
        model.transformer.memory = MemorySettings(stream=chunk)
        got = torch.autograd.grad(model.loss_terms(batch)[0], trained)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
        return
    want, want_grads = gradients(model, batch)
    got, grads = gradients(model, batch, stream=chunk, **settings)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[key], rtol=1e-10, atol=1e-10, msg=key)


def test_evaluation_equals_one_pass():
    """Losses, losses by token, and values for callbacks equal one pass."""
    model, batch = lm(kv_conv=4).eval(), text(61, batch=2)
    with torch.no_grad():
        want, want_losses = model.loss_terms(batch)[0], model.token_losses(batch)
        model.transformer.memory = MemorySettings(stream=10)
        torch.testing.assert_close(model.loss_terms(batch)[0], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.token_losses(batch), want_losses, rtol=1e-12, atol=1e-12)
        calls = []
        model.watch_losses = lambda batch, losses: calls.append(losses)
        model.watch_predictions = lambda batch, tokens: calls.append(tokens)
        torch.testing.assert_close(model.loss_terms(batch)[0], want, rtol=1e-12, atol=1e-12)
        likeliest = model(batch["tokens"]).argmax(-1).where(batch["labels"] != -100, torch.tensor(-100))
        assert torch.equal(calls[0], likeliest)
        torch.testing.assert_close(calls[1], want_losses, rtol=1e-12, atol=1e-12)
    assert not model.transformer.stream._layers, "rows were not freed"


def test_hidden_dropout_has_the_same_masks_in_both_passes():
    """A chunk has the same masks in both passes, chunks differ, and the generator ends as after one ascending pass."""
    model, batch, sums = lm(dropout=0.3), text(), {}
    run = lambda i, layers: model._losses(*model.streaming.chunk(model, batch, i, layers), summed=True)  # noqa: E731

    def watched(i, layers):
        out = run(i, layers)
        sums.setdefault(i, []).append(float(out.detach()))
        return out

    model.transformer.memory = MemorySettings(stream=16)
    torch.manual_seed(0)
    streamed_sum(model.transformer.stream, watched, model.streaming.chunks(model, batch), [model], model.head.weight)
    ended = torch.get_rng_state()
    assert all(a == b for a, b in (sums[i] for i in range(3))) and len(sums[3]) == 1
    torch.manual_seed(0)
    with torch.no_grad():
        streamed_sum(
            model.transformer.stream, watched, model.streaming.chunks(model, batch), [model], model.head.weight
        )
    assert [x[-1] for x in sums.values()] == [x[0] for x in sums.values()]
    assert torch.equal(torch.get_rng_state(), ended)


def fit(optimizer, steps, stream=None, tokens=64, callbacks=(), **trainer):
    """Return (losses, weights) after a fit."""
    model = lm(optimizer=optimizer)
    losses = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *unused):
            losses.append(float(outputs["loss"]))

    recompute = [ActivationRecompute(stream=stream)] if stream else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=steps, precision="64-true", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[*recompute, Losses(), *callbacks], **trainer,
        )  # fmt: skip
        loader = DataLoader([{k: v[0] for k, v in text(tokens, seed=i).items()} for i in range(20)], batch_size=1)
        trainer.fit(model, loader)
    return losses, dict(model.named_parameters())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tol"), [(lambda p: torch.optim.SGD(p, lr=0.05), 1e-8), (adamw, 1e-6)])
def test_the_same_loss_curve(optimizer, tol):
    want, weights = fit(optimizer, 100, tokens=4096)
    got, streamed = fit(optimizer, 100, stream=512, tokens=4096)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=tol)
    assert want[-1] < want[0] - 0.1
    for name, p in streamed.items():
        torch.testing.assert_close(p, weights[name], rtol=0, atol=100 * tol)


def test_accumulation_clipping_and_hooks():
    """Gradient hooks run once per micro-batch. Clipping and accumulation use the gradient of the whole sequence."""
    calls = {"one pass": 0, "stream": 0}

    class Hooked(pl.Callback):
        def __init__(self, name):
            self.name = name

        def on_fit_start(self, trainer, pl_module):
            pl_module.head.weight.register_hook(self.count)

        def count(self, grad):
            calls[self.name] += 1
            return grad * 0.5

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    want, weights = fit(adamw, 4, callbacks=[Hooked("one pass")], **options)
    got, streamed = fit(adamw, 4, stream=10, callbacks=[Hooked("stream")], **options)
    assert calls["stream"] == calls["one pass"] == 8
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=1e-10)
    for name, p in streamed.items():
        torch.testing.assert_close(p, weights[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_stages_stream(stage):
    """Stages outside of a fit stream as well. Afterwards the model has its own settings again."""
    model, loader = lm(), DataLoader([{k: v[0] for k, v in text(seed=i).items()} for i in range(3)], batch_size=1)
    chunks = []

    class Count(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            run = pl_module.streaming.chunk
            pl_module.streaming.chunk = lambda *args: (chunks.append(args[2]), run(*args))[1]

    def results(*callbacks):
        built = trainer(callbacks=list(callbacks), precision="64-true")
        out = getattr(built, stage)(model, loader, **({} if stage == "predict" else {"verbose": False}))
        key = {"validate": "val_loss", "test": "test_loss"}.get(stage)
        return [float(x["bits_per_byte"]) for x in out] if key is None else out[0][key]

    want = results()
    got = results(Count(), ActivationRecompute(stream=20))
    assert got == pytest.approx(want, abs=1e-10)
    assert len(chunks) == 3 * 4
    assert model.transformer.memory == MemorySettings()


def test_a_failed_fit_leaves_no_settings_behind():
    """After a fit has failed, the same callback can stream another model."""
    broken, model, recompute = lm(), lm(), ActivationRecompute(stream=20)
    broken.on_train_start = lambda: 1 / 0
    loader = DataLoader([{k: v[0] for k, v in text().items()}], batch_size=1)
    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[recompute], max_steps=1, precision="64-true").fit(broken, loader)
    lengths, run = [], model.streaming.chunk
    model.streaming.chunk = lambda *args: (lengths.append(len(model.transformer.stream.tokens(args[2]))), run(*args))[1]
    trainer(callbacks=[recompute], precision="64-true").validate(model, loader, verbose=False)
    assert lengths == [20, 20, 20, 4]


def test_truncated_gradients_end_at_chunks():
    """The loss is always exact. Gradients are exact only if no segment crosses a chunk's end."""
    walls = ld.DilatedPattern.dense(16)
    _, want_grads = gradients(lm(walls), text())
    _, grads = gradients(lm(walls), text(), stream=16, truncate=True)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-10, atol=1e-10)
    want, want_grads = gradients(lm(kv_conv=3), text())
    got, grads = gradients(lm(kv_conv=3), text(), stream=16, truncate=True, policy="block")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert max(float((grads[name] - want_grads[name]).abs().max()) for name in grads) > 1e-3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16(precision):
    """Gradients of weights are summed over chunks in fp32, so only bf16's rounding differs from one pass."""
    model, batch = lm(), text()
    model = model.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        want, want_grads = gradients(model, batch)
        got, grads = gradients(model, batch, stream=10, policy="block")
    assert float(got) == pytest.approx(float(want), rel=2e-2)
    for name, grad in grads.items():
        assert grad.dtype == want_grads[name].dtype
        assert (grad - want_grads[name]).norm() <= 0.1 * want_grads[name].norm() + 1e-4, name


def test_compiled_blocks():
    """Chunk and layer are tensors and not constants, so one graph serves all layers and chunks."""
    torch._dynamo.reset()
    want, want_grads = gradients(lm(), text())
    model = lm(compile_blocks=True)
    got, grads = gradients(model, text(), stream=16)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-8, atol=1e-8)
    calls = []
    model.transformer.stream.watch = lambda *chunk: calls.append((*chunk, torch.compiler.is_compiling()))
    with torch.compiler.set_stance("fail_on_recompile"):
        gradients_again = torch.autograd.grad(model.loss_terms(text(seed=5))[0], list(model.parameters()))
    assert all(x.isfinite().all() for x in gradients_again)
    assert len(calls) == 4 + 5 and not any(compiling for *_, compiling in calls)


@pytest.mark.parametrize("settings", [{"policy": "block"}, {"policy": "block", "head_chunks": 4}], ids=str)
def test_a_route_is_made_once_in_each_pass(settings, monkeypatch):
    """A chunk has one route for forward, recomputation and backward, and for all layers with the same pattern."""
    routes, real = [], chunk_call.chunk_route
    monkeypatch.setattr(
        chunk_call, "chunk_route", lambda plan, i, *x: routes.append((i, plan.problem)) or real(plan, i, *x)
    )
    patterns = [GEOMETRIC, GEOMETRIC.shifted(), GEOMETRIC.shifted(0.25)]
    gradients(lm(patterns, depth=6), text(), stream=16, **settings)
    kinds = 3 * settings.get("head_chunks", 1)
    assert len(routes) == kinds * (3 + 4)
    assert len(set(routes)) == kinds * 4


def test_the_host_does_not_wait_to_send_a_chunk(monkeypatch):
    """Tokens and labels of each chunk are sent to the device from pinned memory, once per pass."""
    sent = []
    monkeypatch.setattr(streamed, "send", lambda x, device: sent.append(tuple(x.shape)) or x.to(device))
    gradients(lm(), text(61), stream=16)
    assert sent == 2 * 3 * [(1, 16)] + 2 * [(1, 13)] + 2 * 3 * [(1, 16)]


class Graphs:
    """A torch.compile backend that runs graphs unchanged. `calls`: (tokens, whether sizes are fixed) of each run."""

    def __init__(self):
        self.compiled, self.calls = 0, []

    def __call__(self, graph, inputs):
        self.compiled += 1
        values = [n.meta.get("example_value") for n in graph.graph.nodes if n.op == "placeholder"]
        sizes = [n for x in values if isinstance(x, torch.Tensor) for n in x.shape] + values
        fixed = not any(isinstance(n, torch.SymInt) for n in sizes)

        def run(*tensors):
            self.calls.append((next(x.shape[1] for x in tensors if getattr(x, "ndim", 0) == 3), fixed))
            return graph.forward(*tensors)

        return run

    def compile(self, model):
        torch._dynamo.reset()
        for block in model.transformer.blocks:
            block.compile(fullgraph=True, backend=self)
        return model


def test_whole_chunks_keep_their_graphs_after_a_shorter_one():
    """Full chunks have graphs of fixed size. A last chunk of a different length has a third graph, for any size."""
    graphs = Graphs()
    model = graphs.compile(lm())
    want, want_grads = gradients(lm(), text(61))
    for tokens, last in ((55, 7), (64, 16), (61, 13)):
        graphs.calls.clear()
        got, grads = gradients(model, text(tokens), stream=16)
        ascent = (tokens - 1) // 16 * 3 * [(16, True)]
        assert graphs.calls == [*ascent, *3 * [(last, last == 16)], *ascent]
    assert graphs.compiled == 3
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-8, atol=1e-8)
    for batch in (2, 3, 4, 5):
        before = graphs.compiled
        gradients(model, text(45, batch=batch), stream=16)
    assert graphs.compiled == before, "a graph for each batch size"


def test_documents_of_any_number_share_graphs():
    """Batches may have different numbers of documents. A graph for each number would exceed torch's limit."""
    graphs = Graphs()
    model, same = graphs.compile(lm()), lm()
    for count in (1, 2, 3, 5, 8):
        bounds = torch.linspace(0, 61, count + 1).int()
        got, grads = gradients(model, text(61, cu_seqlens=bounds), stream=16)
        want, want_grads = gradients(same, text(61, cu_seqlens=bounds))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want_grads[name], rtol=1e-8, atol=1e-8)
    assert graphs.compiled == 3


@pytest.mark.parametrize("settings", [{}, {"policy": "block", "tile": 6}, {"head_chunks": 2}], ids=str)
def test_a_copy_of_a_compiled_model_has_its_own_weights(settings):
    model = Graphs().compile(lm())
    model.transformer.memory = MemorySettings(**settings)
    other = lm(seed=7)
    want, grads = gradients(other, text(), **settings)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.load_state_dict(other.state_dict())
        total, count = copied.loss_terms(text())
        (total / count).backward()
        torch.testing.assert_close(total.detach() / count, want, rtol=1e-12, atol=1e-12)
        for name, p in copied.named_parameters():
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"policy": "block", "tile": 6}, {"head_chunks": 2}], ids=str)
def test_parts_of_whole_chunks_keep_their_graphs(settings):
    """Full chunks also keep their graphs if parts of blocks are compiled for the tiles of a chunk."""
    graphs = Graphs()
    model = graphs.compile(lm())
    want, want_grads = gradients(lm(), text(61))
    for tokens in (55, 61):
        graphs.calls.clear()
        got, grads = gradients(model, text(tokens), stream=16, **settings)
        whole = {16, 6} if "tile" in settings else {16}
        assert whole == {length for length, fixed in graphs.calls if fixed}
        assert not whole & {length for length, fixed in graphs.calls if not fixed}
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-8, atol=1e-8)


class Redefined(ld.LongNetLM):
    def token_losses(self, batch):
        return 2 * super().token_losses(batch)


def test_refusals():
    with pytest.raises(ValueError, match=r"truncate=True ends gradients at .* it needs stream=TOKENS"):
        MemorySettings(truncate=True)
    with pytest.raises(ValueError, match="stream must be at least 1, got 0"):
        ActivationRecompute(stream=0)
    sizes = {"dim": 16, "depth": 1, "num_heads": 4}
    for model in (
        ld.LongNetMLM(GEOMETRIC, 8, **sizes),
        ld.LongNetClassifier(GEOMETRIC, feature_dim=3, num_classes=2, **sizes),
    ):
        model.configure_model()
        with pytest.raises(ValueError, match=f"stream=8 .* {type(model).__name__} cannot: it takes a causal model"):
            ActivationRecompute(stream=8).on_fit_start(None, model)
    model = lm()
    model.transformer.memory = MemorySettings(stream=16)
    with pytest.raises(ValueError, match=r"gradients are computed with the sum of losses \(loss_terms\)"):
        model.token_losses(text())
    with pytest.raises(ValueError, match=r'not offered in fp16.*Take precision="bf16-mixed"'):
        model.half().loss_terms(text())
    Own = type("Own", (ld.LongNetLM,), {"loss_terms": lambda self, batch: ld.LongNetLM.loss_terms(self, batch)})
    model = Own(GEOMETRIC, VOCABULARY, 16, 1, 4, max_seq_len=64)
    model.configure_model()
    with pytest.raises(ValueError, match=r"Own redefines loss_terms.*Leave stream out"):
        ActivationRecompute(stream=16).on_fit_start(pl.Trainer(accelerator="cpu", logger=False), model)
    twice = [ActivationRecompute(stream=16), ActivationRecompute()]
    with pytest.raises(ValueError, match="given twice"):
        trainer(callbacks=twice).fit(lm(), [text()])
    model = Redefined(GEOMETRIC, VOCABULARY, 16, 1, 4, max_seq_len=64)
    model.configure_model()
    model.transformer.memory = MemorySettings(stream=16)
    with pytest.raises(ValueError, match=r"Redefined redefines token_losses.*leave out stream=16"):
        model.loss_terms(text())


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["geometric", "hybrid"])
@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_on_a_gpu(pattern, precision):
    """Compiled blocks with recomputation equal one pass on the same GPU."""
    patterns = {
        "geometric": ld.DilatedPattern.geometric(1024, 65536),
        "hybrid": ld.DilatedPattern.hybrid(4, 4, local=1024),
    }
    torch.manual_seed(0)
    model = ld.LongNetLM(patterns[pattern], 256, 256, 4, 4, max_seq_len=65536, kv_conv=4, compile_blocks=True)
    model.configure_model()
    model.cuda()
    tokens = torch.randint(0, 256, (1, 60000), device="cuda")
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
        want, want_grads = gradients(model, batch, policy="block")
        got, grads = gradients(model, batch, policy="block", stream=16384)
        host, again = gradients(model, {k: v.cpu() for k, v in batch.items()}, policy="block", stream=16384)
    tol = 2e-4 if precision == "float32" else 2e-2
    assert float(got) == pytest.approx(float(want), rel=tol / 10) and float(host) == pytest.approx(float(got), rel=1e-5)
    for name, grad in grads.items():
        assert (grad - want_grads[name]).norm() <= tol * want_grads[name].norm(), name
        assert (again[name] - grad).norm() <= tol * grad.norm(), name


@pytest.mark.gpu
def test_rows_beyond_the_budget_wait_on_the_host(monkeypatch):
    """With a budget of 0 all carried rows are stored on the host, and gradients do not change."""
    from lightning_dilated.ext.streams import stream

    model = lm(ld.DilatedPattern.geometric(64, 4096)).float().cuda()
    tokens = torch.randint(0, VOCABULARY, (1, 4096), device="cuda")
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    want, want_grads = gradients(model, batch, stream=256)
    monkeypatch.setattr(stream, "ON_GPU", 0.0)
    got, grads = gradients(model, batch, stream=256)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-4, atol=1e-5)
