"""DilatedModule in a real Trainer: means are exact, optimizers complete, resuming exact; subclasses need two methods.

Without a Trainer, the first use builds the layers, and earlier calls such as `eval()` apply to them.
"""

import contextlib
import functools
import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated import DilatedModule, LongNetLM
from lightning_dilated.models import WarmupCosine

from . import PATTERN, SIZES, batch, loader, text, tiny, trainer


class Line(DilatedModule):
    """A user's module that defines the two required methods only."""

    def build(self):
        self.layer = nn.Linear(3, 1)
        self.builds = getattr(self, "builds", 0) + 1

    def loss_terms(self, batch):
        x, y = batch
        return (self.layer(x)[:, 0] - y).square().sum(), len(y)


def points(n=256):
    x = torch.randn(n, 3)
    return DataLoader(list(zip(x, x @ torch.tensor([1.0, -2.0, 3.0]) + 0.5, strict=True)), batch_size=16)


# -- subclasses --------------------------------------------------------------------------------------------------------
def test_two_methods_make_a_module():
    model, run = Line(functools.partial(torch.optim.AdamW, lr=0.1)), trainer(max_epochs=12)
    run.fit(model, points(), points())
    assert run.callback_metrics["train_loss"] < 0.1 and run.callback_metrics["val_loss"] < 0.1
    assert run.test(model, points(), verbose=False)[0]["test_loss"] < 0.1
    torch.testing.assert_close(model.layer.weight[0], torch.tensor([1.0, -2.0, 3.0]), rtol=0, atol=0.2)


def test_is_built_once():
    """Lightning calls configure_model in every fit, validate and test. Trained weights must not be replaced."""
    model = Line()
    for _ in range(2):
        model.configure_model()
        weights = model.layer.weight.detach().clone()
        trainer().validate(model, points(16), verbose=False)
        trainer(limit_train_batches=0, max_epochs=1).fit(model, points(16))
        assert torch.equal(model.layer.weight, weights)
    assert model.builds == 1


class NoBuild(DilatedModule):
    """Lacks the method `build`."""

    loss_terms = Line.loss_terms


class NoLoss(DilatedModule):
    """Lacks the method that computes the loss."""

    build = Line.build


@pytest.mark.parametrize(
    "cls, says",
    [(NoBuild, r"NoBuild must define build\(\)"), (NoLoss, r"NoLoss must define loss_terms\(batch\)")],
    ids=["build", "loss_terms"],
)
def test_forgotten_method(cls, says):
    with pytest.raises(TypeError, match=says):
        trainer(max_steps=1).fit(cls(), points(16))


# -- the optimizer -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "one frozen"])
def test_parameter_groups(tied, frozen):
    model = tiny(tie_embeddings=tied, bias=True, norm="layernorm")
    model.embedding.weight.requires_grad_(not frozen)
    matrices, vectors = model.parameter_groups()
    assert "weight_decay" not in matrices and vectors["weight_decay"] == 0.0
    assert all(p.ndim >= 2 for p in matrices["params"]) and all(p.ndim < 2 for p in vectors["params"])
    held = [id(p) for group in (matrices, vectors) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


class Look(Callback):
    """Compares the parameters of the optimizer with the model's once training has begun."""

    held, there, moved = None, None, None

    def on_train_start(self, trainer, module):
        groups = trainer.optimizers[0].param_groups
        self.held = {id(p) for group in groups for p in group["params"]}
        self.there = {id(p) for p in module.parameters()}
        self.decay = {p.ndim >= 2: group["weight_decay"] for group in groups for p in group["params"]}
        self.start = [p.detach().clone() for p in module.parameters()]

    def on_train_end(self, trainer, module):
        self.moved = [not torch.equal(p, q) for p, q in zip(module.parameters(), self.start, strict=True)]


def test_optimizer_holds_every_parameter():
    """An optimizer from before configure_model would have old or no parameters, and train nothing without an error."""
    model, look = LongNetLM(PATTERN, **SIZES, optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.3)), Look()
    trainer(max_steps=2, callbacks=[look]).fit(model, loader(batch(2, 20), batch(2, 20)))
    assert look.held == look.there and all(look.moved) and look.decay == {True: 0.3, False: 0.0}


def test_scheduler_steps_every_batch():
    rates = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer, *args):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = Line(
        functools.partial(torch.optim.SGD, lr=1e-3), functools.partial(WarmupCosine, total_steps=4, warmup_steps=1)
    )
    trainer(max_epochs=2, callbacks=[Rates()]).fit(model, points(48))
    assert rates[:3] == pytest.approx([5e-4, 1e-3, 7.75e-4]) and rates[4] == rates[5] == pytest.approx(1e-4)


# -- the loss ----------------------------------------------------------------------------------------------------------
def uneven():
    """Return batches with 3, 37 and 0 counted tokens."""
    batches = [batch(2, 20), batch(2, 20), batch(1, 20)]
    for data, counting in zip(batches, (3, 37, 0), strict=True):
        data["labels"].view(-1)[counting:] = -100
    return batches


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_mean_over_all_tokens_of_the_epoch(stage):
    model, batches = tiny(dtype=torch.float32), uneven()
    with torch.no_grad():
        totals, tokens = zip(*(model.loss_terms(b) for b in batches), strict=True)
    want = (sum(totals) / sum(tokens)).item()
    assert sum(tokens) == 40 and abs(want - sum(t / n for t, n in zip(totals, (3, 37), strict=False)) / 2) > 1e-4
    for _ in range(2):  # sums must be reset before the next epoch
        (metrics,) = getattr(trainer(), stage)(model, loader(*batches), verbose=False)
        name = "val" if stage == "validate" else "test"
        assert metrics[f"{name}_loss"] == pytest.approx(want, rel=1e-6)
        assert metrics[f"{name}_bits_per_byte"] == pytest.approx(want / 0.6931472, rel=1e-6)


def test_batch_without_tokens():
    model = tiny()
    loss = model.training_step(uneven()[2], 0)
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_diverged_batch_shows_in_the_mean():
    """A mean that skips nan would rank the checkpoint of a diverged model as the best."""
    x, y = torch.randn(32, 3), torch.zeros(32)
    y[20] = torch.nan
    data = DataLoader(list(zip(x, y, strict=True)), batch_size=16)
    assert math.isnan(trainer().validate(Line(), data, verbose=False)[0]["val_loss"])


def fitted(batches, seed=1, **options):
    torch.manual_seed(seed)
    model = LongNetLM(PATTERN, **SIZES, optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    trainer(max_epochs=1, **options).fit(model, loader(*batches))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_accumulation_equals_one_large_batch():
    large = batch(4, 20)
    halves = [{k: v[i : i + 2] for k, v in large.items()} for i in (0, 2)]
    want = fitted([large], precision="64-true")
    torch.testing.assert_close(fitted(halves, accumulate_grad_batches=2, precision="64-true"), want)
    assert not torch.allclose(fitted(halves, precision="64-true"), want)


@pytest.mark.parametrize("precision, dtype", [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_half_precision(precision, dtype):
    torch.manual_seed(0)
    model = LongNetLM(PATTERN, **SIZES, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    data = batch(2, 20)
    run = trainer(max_epochs=1, precision=precision)
    run.fit(model, loader(*[data] * 30), loader(data))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert run.callback_metrics["train_loss"] < 1.5  # the initial loss is log(11) = 2.4
    assert run.callback_metrics["val_loss"].dtype == torch.float32


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_a_fused_optimizer_is_clipped(algorithm):
    """Lightning refuses to clip gradients of fused optimizers under bf16-mixed, although it uses no scaler there."""
    weights = {}
    for fused, clip in ((True, 0.02), (False, 0.02), (False, None)):
        torch.manual_seed(0)
        make = functools.partial(torch.optim.SGD, lr=0.5, fused=fused)
        model, data = LongNetLM(PATTERN, **SIZES, optimizer=make), batch(2, 20)
        options = {"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm}
        trainer(max_steps=2, precision="bf16-mixed", **options).fit(model, loader(data, data))
        weights[fused, clip] = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(weights[True, 0.02], weights[False, 0.02])
    assert (weights[False, None] - weights[True, 0.02]).norm() > 0.1


# -- resuming ----------------------------------------------------------------------------------------------------------
class Stop(Callback):
    """Interrupts a run in mid-epoch."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            raise KeyError("power cut")


def train(folder, stop=None, resume=None):
    torch.manual_seed(3)
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    decay = functools.partial(WarmupCosine, total_steps=60, warmup_steps=5)
    model = LongNetLM(PATTERN, dim=16, depth=1, num_heads=4, optimizer=make, lr_scheduler=decay)
    saver = ModelCheckpoint(folder / str(resume is None), filename="{step}", every_n_train_steps=7, save_top_k=-1)
    run = trainer(max_epochs=2, enable_checkpointing=True, callbacks=[saver, *([Stop(stop)] if stop else [])])
    with contextlib.suppress(KeyError):
        run.fit(model, datamodule=text(folder), ckpt_path=resume, weights_only=True if resume else None)
    return model, run


def test_resumed_run_ends_at_the_same_bits(tmp_path):
    """An epoch has 41 steps. The run is interrupted in the second epoch, and its last checkpoint has step 49."""
    whole, run = train(tmp_path)
    broken, _ = train(tmp_path, stop=52)
    resumed, again = train(tmp_path, resume=tmp_path / "True" / "step=49.ckpt")
    assert run.global_step == again.global_step > 52
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole.parameters(), broken.parameters(), strict=True))


# -- models without a Trainer ------------------------------------------------------------------------------------------
TOKENS = torch.arange(20)[None] % 32


def make(**options) -> ld.LongNetLM:
    return ld.LongNetLM(PATTERN, vocab_size=32, dim=16, depth=2, num_heads=2, **options)


def test_eval_before_the_first_call_turns_dropout_off():
    model = make(dropout=0.5, attention_dropout=0.5).eval()
    assert torch.equal(model(TOKENS), model(TOKENS))
    assert not any(m.training for m in model.modules())


def test_generate_draws_without_dropout():
    torch.manual_seed(0)
    model = make(dropout=0.5)
    first = model.generate(TOKENS, 20, temperature=0)
    assert torch.equal(first, model.eval().generate(TOKENS, 20, temperature=0))


@pytest.mark.parametrize(
    "use",
    {
        "parameters": lambda m: sum(p.numel() for p in m.parameters()) > 1000,
        "optimizer": lambda m: bool(torch.optim.AdamW(m.parameters()).param_groups[0]["params"]),
        "own optimizer": lambda m: len(m.configure_optimizers().param_groups) == 2,
        "dtype": lambda m: m.double()(TOKENS).dtype == torch.float64,
        "frozen": lambda m: not m.requires_grad_(False)(TOKENS).requires_grad,
        "state": lambda m: "embedding.weight" in m.state_dict(),
    }.items(),
    ids=lambda item: item[0],
)
def test_asking_for_weights_builds(use):
    assert use[1](make())


def test_weights_load_into_a_new_model():
    one, two = make(), make()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.eval()(TOKENS), two.eval()(TOKENS))
