"""With layout="auto", each start of a run chooses a layout by patterns and length. Losses do not depend on it."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedModule, DilatedPattern, LongNetLM, RingDilatedStrategy
from lightning_dilated.data import ByteDataModule
from lightning_dilated.sequence.links import Links
from lightning_dilated.strategy.layout import declared_length, layout_for

from .runs import Record, launched, trainer, write_bytes

HYBRID = DilatedPattern.hybrid(depth=2, num_heads=4, local=8, global_every=2)
LONG = 1 << 20
PRICES = {"head_size": 1, "ranks_per_node": None, "links": Links(), "exchange_memory": None}


def language_model(pattern=HYBRID, **options):
    return LongNetLM(**{"pattern": pattern, "vocab_size": 11, "dim": 16, "depth": 2, "num_heads": 4, **options})


@pytest.mark.parametrize(
    ("options", "tokens", "ranks", "exchange", "stream", "expected"),
    [
        ({}, LONG, 4, "auto", None, "zigzag"),
        ({}, LONG, 1, "auto", None, "contiguous"),
        ({}, 64, 4, "auto", None, "contiguous"),
        ({}, None, 4, "auto", None, "contiguous"),
        ({}, LONG, 4, "gather", None, "contiguous"),
        ({}, LONG, 4, "auto", 4096, "contiguous"),
        ({"pattern": DilatedPattern.geometric(2048, LONG)}, LONG, 4, "auto", None, "contiguous"),
    ],
)
def test_layout_for(options, tokens, ranks, exchange, stream, expected):
    assert layout_for(language_model(**options), tokens, ranks, exchange, stream, PRICES) == expected


def test_a_limit_of_the_exchanges_memory_keeps_contiguous():
    """A call's limit depends on the batch and the features per head, which are not known during setup."""
    assert layout_for(language_model(), LONG, 4, "auto", None, {**PRICES, "exchange_memory": 1 << 40}) == "contiguous"


def test_modules_that_do_not_declare_it():
    class Own(DilatedModule):
        causal, patterns, num_heads, num_kv_heads, depth = True, tuple(HYBRID), 4, None, 2

    class Declared(Own):
        takes_any_layout = True

    assert layout_for(Own(), LONG, 4, "auto", None, PRICES) == "contiguous"

    class Bare(pl.LightningModule):
        causal = takes_any_layout = True

    class WithoutKvHeads(DilatedModule):
        causal, takes_any_layout, patterns, num_heads, depth = True, True, tuple(HYBRID), 4, 2

    assert layout_for(Declared(), LONG, 4, "auto", None, PRICES) == "zigzag"
    assert layout_for(WithoutKvHeads(), LONG, 4, "auto", None, PRICES) == "zigzag"
    assert layout_for(Bare(), LONG, 4, "auto", None, PRICES) == "contiguous"


class OwnForward(LongNetLM):
    def forward(self, *args, **options):
        return super().forward(*args, **options)


class OwnScheduler(LongNetLM):
    def configure_optimizers(self):
        return super().configure_optimizers()


class DeclaredAnew(OwnForward):
    takes_any_layout = True


@pytest.mark.parametrize(
    ("cls", "expected"), [(OwnForward, "contiguous"), (OwnScheduler, "zigzag"), (DeclaredAnew, "zigzag")]
)
def test_a_subclass_with_its_own_forward_declares_anew(cls, expected):
    """A subclass with its own forward must declare support again, because it may assume contiguous positions."""
    model = cls(pattern=HYBRID, vocab_size=11, dim=16, depth=2, num_heads=4)
    assert layout_for(model, LONG, 4, "auto", None, PRICES) == expected


def test_declared_length(tmp_path):
    model, data = language_model(max_seq_len=4096), ByteDataModule(str(tmp_path), seq_len=64)
    assert declared_length(model, None) == 4096 and declared_length(model, data) == 64
    assert declared_length(language_model(), None) is None
    assert declared_length(model, ByteDataModule(str(tmp_path), seq_len=64, pack_tokens=128)) is None


def part_of_run(rank, group, folder, settings, stop, ckpt):
    """Return (losses, parameters, layout, path of a checkpoint) of a run up to step `stop`."""
    pl.seed_everything(1, verbose=False)
    world, record, strategy = launched(rank), Record(), RingDilatedStrategy(**settings)
    built = trainer(strategy, world, max_steps=stop, callbacks=[record], precision="64-true")
    data = ByteDataModule(folder, seq_len=64, batch_size=2, val_fraction=0, test_fraction=0)
    model = language_model(vocab_size=256)
    built.fit(model, data, ckpt_path=ckpt)
    built.save_checkpoint(path := f"{folder}.{stop}.{world}.ckpt")
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return record.losses, parameters, strategy.sequence.layout, path


@pytest.mark.full
def test_resumes_under_another_layout(pools, tmp_path):
    """The choice is zigzag on four ranks with free links, and contiguous on two ranks with default links."""
    folder = write_bytes(tmp_path / "text", 4000)
    Links(near=1e18, far=1e18, round=1e-18, message=1e-18).save(tmp_path / "links.json")
    whole, parameters, layout, _ = pools(1).run(1, part_of_run, folder, {}, 4, None)[0]
    assert layout == "contiguous"
    free = {"links": str(tmp_path / "links.json")}
    answers = pools(4).run(4, part_of_run, folder, free, 2, None)
    first, _, _, path = answers[0]
    assert {layout for _, _, layout, _ in answers} == {"zigzag"}
    later, resumed, layout, _ = pools(2).run(2, part_of_run, folder, {}, 4, path)[0]
    assert layout == "contiguous"
    torch.testing.assert_close(torch.tensor(first + later), torch.tensor(whole), rtol=1e-9, atol=0)
    torch.testing.assert_close(resumed, parameters, rtol=1e-9, atol=1e-12)
