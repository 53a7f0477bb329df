"""Memory settings on a GPU keep the gradients and use less memory in every step."""

import functools
import gc

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.data import ByteDataModule
from lightning_dilated.memory.offload import pinned_bytes
from lightning_dilated.memory.settings import MemorySettings

from .test_memory_settings import SETTINGS, gradients

pytestmark = pytest.mark.gpu
PATTERN = DilatedPattern.longnet([512, 2048, 8192], [1, 2, 4])
SIZES = {"dim": 256, "depth": 6, "num_heads": 4, "num_kv_heads": 2}


def model_of(**options):
    torch.manual_seed(0)
    model = LongNetLM(PATTERN, **{**SIZES, **options})
    model.configure_model()
    return model.cuda()


def tokens_of(length):
    text = torch.randint(0, 256, (1, length + 1), generator=torch.Generator().manual_seed(1)).cuda()
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def distance(got, want):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


#: no compiled run with tiles of one token: it would call the same compiled code for each token
WAYS = [
    (name, compiled) for name, x in SETTINGS.items() for compiled in (False, True) if not (compiled and x.tile == 1)
]


@pytest.mark.parametrize("name, compiled", WAYS)
def test_float32(name, compiled):
    chosen = SETTINGS[name]
    model, data = model_of(engine="triton"), tokens_of(1000 if chosen.tile == 1 else 16384)
    want = gradients(model, MemorySettings(), data)
    if compiled:
        torch._dynamo.reset()
        model.transformer.compile_blocks()
    if chosen.tile and chosen.tile > 1:
        chosen = MemorySettings(**{**vars(chosen), "tile": 3000})
    for _ in range(3):  # later steps reuse the memory that earlier steps freed
        assert distance(gradients(model, chosen, data), want) < 1e-4


def test_offloaded_inputs_are_counted_as_pinned():
    model, data, before = model_of(), tokens_of(16384), pinned_bytes()
    gradients(model, MemorySettings("block", offload=1.0), data)
    inputs = 16384 * SIZES["dim"] * 4
    assert pinned_bytes() - before == model.transformer._host.bytes >= 2 * inputs
    del model
    gc.collect()
    assert pinned_bytes() == before


@pytest.mark.parametrize("residual", [None, "bfloat16"])
def test_bfloat16(residual):
    model, data = model_of(residual_dtype=residual), tokens_of(16384)
    exact = gradients(model, MemorySettings(), data)
    with torch.autocast("cuda", torch.bfloat16):
        plain = distance(gradients(model, MemorySettings(), data), exact)
        for chosen in SETTINGS.values():
            if chosen.tile != 1:
                assert distance(gradients(model, chosen, data), exact) < 1.5 * plain + 1e-3


def peak(model, chosen, data):
    """Return (peak bytes, bytes after the forward) of the second step, without the bytes of the model."""
    model.transformer.memory = chosen
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.token_losses(data).mean()
        saved = torch.cuda.memory_allocated() - before
        torch.autograd.grad(loss, list(model.parameters()))
        del loss
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, saved


def test_memory():
    length = 262144
    model, data = model_of(residual_dtype="bfloat16"), tokens_of(length)
    model.transformer.compile_blocks()
    row = length * SIZES["dim"] * 2  # bytes of the input of a block
    by_setting = {
        name: peak(model, chosen, data)
        for name, chosen in {
            "none": MemorySettings(),
            "block": MemorySettings("block"),
            "tile": MemorySettings("block", tile=16384),
            "heads": MemorySettings("block", tile=16384, head_chunks=2),
            "every": MemorySettings("block", every=3, tile=16384, head_chunks=2),
            "offload": MemorySettings("block", offload=1, tile=16384, head_chunks=2),
        }.items()
    }
    relative = {name: (p / row, k / row) for name, (p, k) in by_setting.items()}
    print(relative)
    assert relative["none"][0] > relative["block"][0] > relative["tile"][0] > relative["heads"][0], relative
    assert relative["every"][1] < relative["heads"][1] - 3.5, relative  # two of the six inputs are stored
    assert relative["offload"][1] < relative["heads"][1] - 3.5, relative  # up to two copies are in transit
    assert relative["offload"][0] < relative["heads"][0] - 2.5, relative


EVERYTHING = {"policy": "block", "every": 2, "offload": 1, "tile": 3000, "head_chunks": 2}


def losses_of_twenty_steps(precision, engine, memory):
    """Train with the Trainer on real bytes, where the update of a step affects the next loss."""
    pl.seed_everything(0)
    torch._dynamo.reset()
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    model = LongNetLM(PATTERN, **SIZES, engine=engine, optimizer=optimizer, compile_blocks=True)
    losses = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *unused):
            losses.append(outputs["loss"].detach())

    callbacks = [Keep(), *([ActivationRecompute(**memory)] if memory else [])]
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(devices=1, precision=precision, max_steps=20, limit_val_batches=0, callbacks=callbacks, **off)
    trainer.fit(model, ByteDataModule(seq_len=32768, batch_size=1))
    return torch.stack(losses)


@pytest.mark.parametrize(("precision", "engine", "tol"), [("32-true", "triton", 1e-6), ("bf16-mixed", "auto", 1e-2)])
def test_twenty_steps(precision, engine, tol):
    """A run with all exact settings together has the losses of a run without settings."""
    want = losses_of_twenty_steps(precision, engine, None)
    again = losses_of_twenty_steps(precision, engine, None)
    losses = losses_of_twenty_steps(precision, engine, EVERYTHING)
    off, noise = (float(((x - want) / want).abs().max()) for x in (losses, again))
    print(f"| {precision} | {engine} | {want[0]:.6f} | {want[-1]:.6f} | {losses[-1]:.6f} | {off:.1e} | {noise:.1e} |")
    assert len(want) == 20 and want[-1] < want[0] - 0.5 and off < tol
