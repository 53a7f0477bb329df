"""MemoryProfiler on the CPU: bytes known by hand, several batches and optimizers per step, logs, table, pictures."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
)
from lightning_dilated.ext.profiling.memory.phases import BACKWARD, FORWARD, OPTIMIZING, REST, Phase
from lightning_dilated.ext.profiling.memory.profiler import MemoryProfiler

from ...models import batch, loader, text, tiny
from ...models import trainer as quiet
from .stacks import ACTIVATION, SCALARS, WEIGHT, Block, Kept, Losses, Stack, batches

pytestmark = pytest.mark.full


def fit(folder, module, steps=2, profiler=None, data=None, **options):
    """Return (profiler, logs by step) of a fit."""
    profiler, logger = profiler or MemoryProfiler(1), Kept()
    extra = options.pop("callbacks", [])
    trainer = quiet(max_steps=steps, callbacks=[profiler, *extra], logger=logger, default_root_dir=folder, **options)
    trainer.fit(module, loader(*(data or batches(8))), loader(*batches(1)))
    return profiler, logger.steps


def highest(measured):
    """Return the highest span of each phase."""
    spans = {}
    for x in measured.spans:
        assert sum(x.kinds.values()) == x.allocated and x.stop >= x.start
        if x.phase not in spans or x.allocated > spans[x.phase].allocated:
            spans[x.phase] = x
    return spans


def but_scalars(span):
    """Return (bytes by kind, their sum) without the scalars of the loss, which are activations or temporary."""
    whole = {kind: n // 128 * 128 for kind, n in span.kinds.items() if n >= 128}
    assert 0 <= span.allocated - sum(whole.values()) < SCALARS
    return whole, sum(whole.values())


def test_by_hand(tmp_path):
    """In the second step, weights, gradients and momenta of two blocks have 512 bytes each. The batch has 128."""
    profiler, steps = fit(tmp_path, Stack(), check_val_every_n_epoch=None)
    spans = highest(profiler.measured)
    always = {PARAMETERS: 512, GRADIENTS: 512, OPTIMIZER: 512, BATCH: 128}
    # within a block, the output of the Linear exists until the Tanh has computed its output
    first, second = spans[Phase(FORWARD, 0)], spans[Phase(FORWARD, 1)]
    assert first.kinds == {**always, ACTIVATIONS: 128, TEMPORARY: 128} and first.allocated == 1920
    assert second.kinds == {**always, ACTIVATIONS: 256, TEMPORARY: 128} and second.allocated == 2048
    assert but_scalars(spans[Phase(FORWARD)]) == ({**always, ACTIVATIONS: 256}, 1920)
    # the gradients of the previous step are freed, and the backward of each block allocates new ones
    fixed = {PARAMETERS: 512, OPTIMIZER: 512, BATCH: 128}
    assert but_scalars(spans[Phase(BACKWARD)])[1] <= 1664
    # second block: the first block's saved output, the gradient of the second block's weight, and the gradients of the
    # input and output of its Linear
    expected = {**fixed, ACTIVATIONS: 128, GRADIENTS: 256, TEMPORARY: 256}
    assert but_scalars(spans[Phase(BACKWARD, 1)]) == (expected, 1792)
    # first block: its saved output, the gradient of that output, and the gradient of the output of its Linear
    assert but_scalars(spans[Phase(BACKWARD, 0)]) == (expected, 1792)
    assert but_scalars(spans[Phase(OPTIMIZING)]) == (always, 1664)
    assert but_scalars(spans[Phase(REST)])[1] == 1664
    assert (
        profiler.measured.top.phase == Phase(FORWARD, 1) and profiler.top.allocated == profiler.peak_allocated == 2048
    )
    assert (profiler.top.step, profiler.top.rank, profiler.steps, profiler.peak_reserved) == (1, 0, 2, None)
    logged = steps[1]
    assert logged["memory/peak_mb"] == logged["memory/forward_block_2_mb"] == logged["memory/forward_mb"] == 0.002048
    assert logged["memory/forward_block_1_mb"] == logged["memory/forward_block_1_min_mb"] == 0.00192
    assert logged["memory/at_peak/saved_activations_mb"] == 0.000256 and logged["memory/host_mb"] > 10
    # before the backward of the first step there are neither gradients nor momenta
    assert steps[0]["memory/forward_block_2_mb"] == 0.001024 and set(steps[0]) == set(logged)
    rows = {x.phase: x for x in profiler.rows}
    assert rows[Phase(FORWARD, 1)].allocated == rows[Phase(FORWARD, 1)].least == 2048
    assert rows[Phase(FORWARD, 1)].reserved is None and len(rows) == len(profiler.rows) == 8


@pytest.mark.parametrize("again", ["reentrant", "other"])
def test_recomputed_by_the_module(tmp_path, again):
    """Between forward and backward only block inputs exist. The backward of a block recomputes its activations."""
    profiler, _ = fit(tmp_path, Stack(3, again))
    spans = highest(profiler.measured)
    assert but_scalars(spans[Phase(FORWARD)])[0][ACTIVATIONS] == 2 * ACTIVATION  # block inputs without the batch
    for i in range(3):
        kinds = spans[Phase(BACKWARD, i)].kinds
        assert kinds[GRADIENTS] in ((2 - i) * WEIGHT, (3 - i) * WEIGHT)  # later blocks, finally this one
        assert kinds[ACTIVATIONS] // ACTIVATION == i  # inputs of this block and of earlier blocks, without the batch
        assert kinds[TEMPORARY] >= 2 * ACTIVATION  # recomputed activations, gradients


def test_recomputed_blocks(tmp_path):
    """ActivationRecompute stores the inputs of blocks and recomputes other activations."""
    by_policy = {}
    for policy in ("none", "attention-kept", "block"):
        model = tiny(dtype=torch.float32, depth=3, dim=64).train()
        profiler, _ = fit(
            tmp_path, model, data=[batch(2, 64)] * 2, callbacks=[ActivationRecompute(policy)], limit_val_batches=0
        )
        peaks = highest(profiler.measured)
        by_policy[policy] = peaks[Phase(FORWARD)].kinds[ACTIVATIONS], peaks[Phase(BACKWARD, 0)].kinds[TEMPORARY]
    x = 2 * 64 * 64 * 4
    assert by_policy["none"][0] > by_policy["attention-kept"][0] > by_policy["block"][0]
    # a block's op saves q, k, v (not under this policy), out and lse; the block's input is saved under either policy
    lse = 2 * 4 * 64 * 4
    assert by_policy["attention-kept"][0] - by_policy["block"][0] == 3 * (x + lse)
    assert by_policy["block"][1] > by_policy["none"][1]


def test_losses_do_not_change(tmp_path):
    """Losses are equal bit by bit, even with recomputation and dropout."""
    results = []
    for profilers in ([], [MemoryProfiler(1)], [MemoryProfiler(2, timeline=False)]):
        for policy in ("none", "block"):
            pl.seed_everything(5)
            model, losses = tiny(dtype=torch.float32, dropout=0.1).train(), Losses()
            callbacks = [*profilers, losses, ActivationRecompute(policy)]
            data = [batch(2, 24) for _ in range(4)]
            quiet(max_steps=4, callbacks=callbacks, default_root_dir=tmp_path).fit(model, loader(*data))
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            results.append((losses.losses, weights))
    assert all(x[0] == y[0] and torch.equal(x[1], y[1]) for x, y in zip(results[2:], results[:2] * 2, strict=True))


def test_the_most_of_all_steps(tmp_path):
    """The second of three steps has twice the rows, so its peak is reported."""
    profiler, steps = fit(tmp_path, Stack(), 3, data=[*batches(1), *batches(1, 8), *batches(1)])
    most = 2048 + 4 * ACTIVATION  # batch, two saved activations, one in the block
    row = next(x for x in profiler.rows if x.phase == Phase(FORWARD, 1))
    assert row.allocated == row.least == profiler.top.allocated == profiler.peak_allocated == most
    assert (
        profiler.top.step == 1 and steps[1]["memory/peak_mb"] == most / 1e6 and profiler.measured.top.allocated == 2048
    )


def test_some_steps(tmp_path):
    """With every_n_steps=3, the second and fifth of seven steps are measured."""
    profiler, steps = fit(tmp_path, Stack(), 7, MemoryProfiler(3))
    assert list(steps) == [1, 4] and profiler.steps == 2
    every = fit(tmp_path, Stack(), 7)[1]
    assert list(every) == list(range(7))
    same = lambda x: {k: v for k, v in x.items() if "host" not in k}  # noqa: E731
    assert [same(every[i]) for i in steps] == [same(x) for x in steps.values()]


def test_several_batches_a_step(tmp_path):
    """During the forward of the second batch, the first batch's gradients exist. The optimizer runs once for both."""
    profiler, steps = fit(tmp_path, Stack(), 2, accumulate_grad_batches=2)
    assert list(steps) == [0, 1] and profiler.steps == 2
    spans = [x for x in profiler.measured.spans if x.phase == Phase(FORWARD, 1)]
    kinds = {PARAMETERS: 512, GRADIENTS: 512, OPTIMIZER: 512, BATCH: 128, ACTIVATIONS: 256, TEMPORARY: 128}
    assert len(spans) == 2 and spans[0].kinds == kinds
    # the first batch still exists, because Lightning prefetches; other numbers do not change
    assert spans[1].kinds[GRADIENTS] == 512 and spans[1].kinds[ACTIVATIONS] // 128 == 2
    assert [x.phase.stage for x in profiler.measured.spans].count(OPTIMIZING) == 1
    skipping = fit(tmp_path, Stack(), 4, MemoryProfiler(2), accumulate_grad_batches=2)[1]
    assert list(skipping) == [1, 3] and all("memory/optimizer_mb" in x for x in skipping.values())


def test_validation_is_not_counted(tmp_path):
    """Validation batches are a thousand times larger. `Stack` keeps the gradients during validation."""
    plain, _ = fit(tmp_path, Stack(), 4, limit_val_batches=0)
    checked, _ = fit(tmp_path, Stack(), 4, val_check_interval=1)
    assert plain.rows == checked.rows and plain.peak_allocated == checked.peak_allocated == 2048


class Two(pl.LightningModule):
    """Two blocks, each with its own optimizer. The optimizers step one after the other."""

    def __init__(self):
        super().__init__()
        self.layers, self.automatic_optimization = nn.ModuleList([Block(), Block()]), False

    def training_step(self, batch, batch_idx):
        for layer, optimizer in zip(self.layers, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).sum())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(layer.parameters()) for layer in self.layers]


def test_several_optimizers(tmp_path):
    profiler, steps = fit(tmp_path, Two(), 4)  # Lightning counts the steps of each optimizer
    assert list(steps) == [0, 1]
    names = [x.phase for x in profiler.measured.spans if x.phase != Phase(FORWARD)]
    one = lambda i: [Phase(FORWARD, i), Phase(BACKWARD), Phase(BACKWARD, i)]  # noqa: E731
    assert [x for x in names if x != Phase(BACKWARD) and x.stage != OPTIMIZING] == [
        x for i in (0, 1) for x in one(i)[::2]
    ]
    assert names.count(Phase(OPTIMIZING)) == 2
    forward = next(x for x in profiler.measured.spans if x.phase == Phase(FORWARD, 1))
    # weights of both blocks, Adam's moments and counts, and the first block's gradient; the second's was just freed
    expected = {PARAMETERS: 512, GRADIENTS: 256, OPTIMIZER: 4 * 256 + 8, BATCH: 128, ACTIVATIONS: 128}
    assert {k: n for k, n in forward.kinds.items() if k in expected and k != ACTIVATIONS} == {
        k: n for k, n in expected.items() if k != ACTIVATIONS
    }
    assert forward.kinds[ACTIVATIONS] // 128 == 1


def test_a_broken_batch_is_forgotten(tmp_path):
    class Break(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if trainer.global_step == 2 and trainer.current_epoch == 0 else None

    profiler, steps = fit(tmp_path, Stack(), 4, callbacks=[Break()])
    assert list(steps) == [0, 1, 2, 3] and profiler.top.allocated == 2048


# -- what is written ---------------------------------------------------------------------------------------------------
def test_pictures_and_table(tmp_path, capsys):
    folder = tmp_path / "new"
    fit(tmp_path, Stack(), 2, MemoryProfiler(1, folder=folder))
    assert (folder / "memory_timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    said = " ".join(capsys.readouterr().out.split())
    assert "forward of block 2 of 2 │ 2.048 │ 0 │ 2.048 │" in said and "reserved" not in said
    assert (
        "The highest peak: 2.048 kB on rank 0 in step 1, forward of block 2 of 2. It is made of parameters 0.512 kB"
        in said
    )


def test_nothing_measured(tmp_path, capsys):
    profiler, steps = fit(tmp_path, Stack(), 1, MemoryProfiler())
    assert steps == {} and profiler.rows == [] and "No training step was measured" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_a_module_without_blocks(tmp_path):
    class Plain(Stack):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Block(), Block())

    profiler, steps = fit(tmp_path, Plain())
    assert [x.phase for x in profiler.rows] == [Phase(x) for x in (FORWARD, BACKWARD, OPTIMIZING, REST)]
    assert profiler.top.allocated == 2048 and "memory/forward_other_mb" not in steps[1]


def test_a_second_fit_begins_anew(tmp_path):
    profiler = MemoryProfiler(1)
    fit(tmp_path, Stack(), 3, profiler)
    fit(tmp_path, Stack(1), 2, profiler)
    assert profiler.steps == 2 and profiler.top.allocated < 2048 and len(profiler.rows) == 6
    module = Stack()
    fit(tmp_path, module, 1, profiler)
    assert all("_compiled_call_impl" not in x.__dict__ for x in module.layers)


def test_a_language_model(tmp_path):
    """On one rank no bytes count as exchange, and gradients exist once."""
    profiler = MemoryProfiler(1, folder=tmp_path)
    trainer = quiet(max_steps=2, callbacks=[profiler], strategy="ring_dilated", devices=1)
    model = tiny(dtype=torch.float32, vocab_size=256).train()
    trainer.fit(model, datamodule=text(tmp_path))
    assert profiler.top.kinds[EXCHANGE] == 0 and len(profiler.rows) == 8
    assert max(x.kinds.get(GRADIENTS, 0) for x in profiler.measured.spans) == sum(
        4 * p.numel() for p in model.parameters()
    )
