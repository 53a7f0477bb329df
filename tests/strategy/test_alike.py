"""Ranks that differ in settings, data, numbers of batches or parameters raise errors instead of hanging."""

import copy
import enum
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dilated import (
    DilatedPattern,
    LongNetLM,
    LongNetMLM,
    OuterSteps,
    RingDilatedFSDPStrategy,
    RingDilatedStrategy,
    SequenceSpec,
    loss_share,
)
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.checkpoint.state import bits
from lightning_dilated.data import ByteDataModule
from lightning_dilated.strategy.checks import _described, compare_settings, parameters_of
from lightning_dilated.strategy.replicas import Replicas

from .runs import PATTERN, VOCAB, Data, Run, launched, make, trainer
from .test_hooks import Numbers, Plain

pytestmark = pytest.mark.full


class Other(Numbers):
    """Samples with an entry that every rank gets whole."""

    def __init__(self, size=8, first=0, fingerprint=None):
        self.size, self.first = size, first
        if fingerprint:
            self.fingerprint = lambda: fingerprint

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index + self.first, "many": torch.full((20,), self.first)}


class Whole(Plain):
    sequence_spec = SequenceSpec({"x": 1, "noise": 1}, whole=["index", "many"])


UNLIKE = {
    "samples": ({"size": 7}, {}, "samples: rank 0 has 8, rank 1 has 7"),
    "files": ({"fingerprint": "b"}, {"fingerprint": "a"}, "fingerprint: rank 0 has a, rank 1 has b"),
    "entries": ({"first": 3}, {}, "index: rank 0 has [0], rank 1 has [3]"),
}


def unlike(rank, group, name):
    other, usual, _ = UNLIKE[name]
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=1, use_distributed_sampler=False)
    built.fit(Whole(), DataLoader(Other(**(other if rank else usual))))


@pytest.mark.parametrize("name", UNLIKE)
def test_other_data_on_a_rank(pools, name):
    for error in pools(2).errors(ValueError, 2, unlike, name):
        assert "nothing was computed" in error and UNLIKE[name][2] in error
        assert name != "entries" or "many: rank 0 has (1, 20) torch.int64 " in error


class Broken(Numbers):
    """Data with a fingerprint that fails on rank 1, or with fewer samples on rank 3."""

    def __init__(self, rank, how):
        self.rank, self.how = rank, how

    def __len__(self):
        return 4 if self.how == "short" and self.rank == 3 else 8

    def fingerprint(self):
        if self.how == "error" and self.rank == 1:
            raise OSError("no such disk")
        return "same"


def broken(rank, group, how):
    built = trainer(RingDilatedStrategy(sequence_size=2), launched(rank), max_steps=1)
    try:
        built.fit(Plain(), DataLoader(Broken(rank, how)))
    except (ValueError, OSError) as error:
        return str(error)


@pytest.mark.parametrize(
    "how, words",
    [pytest.param("error", "no such disk", marks=pytest.mark.slow), ("short", "rank 2 has 8, rank 3 has 4")],
)
def test_ranks_of_other_sequences_do_not_wait(pools, how, words):
    assert all(words in error for error in pools(4).run(4, broken, how))


def two_loaders(rank, group, kind, other):
    """Train on two loaders; one differs on rank 1 if `other` is nonzero. Return the number of steps or the error."""
    loaders = [DataLoader(Other(first=100)), DataLoader(Other(first=other * rank))]
    model = Whole()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch[0] if kind is list else batch["a"], batch_idx)
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=2)
    try:
        built.fit(model, loaders if kind is list else dict(zip("ab", loaders, strict=True)))
    except ValueError as error:
        return str(error)
    return built.global_step


@pytest.mark.parametrize("kind", [list, dict])
def test_several_loaders(pools, kind):
    assert pools(2).run(2, two_loaders, kind, 0) == [2, 2]
    assert all("many: rank 0 has" in error for error in pools(2).run(2, two_loaders, kind, 1))


SGD, ADAM = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.1)


class Odd:
    pass


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Switch(enum.Flag):
    A = 1
    B = 2


@dataclass
class Settings:
    """A class with a memory address in its repr, which differs between processes."""

    size: object = 1
    inner: object = field(default_factory=Odd)
    cache: object = field(default=None, compare=False)


EQUAL = [
    *("a", None, [1, 2.0], {"a": {1}}, torch.zeros(3), torch.zeros(40, dtype=torch.bfloat16), torch.zeros(0), Odd()),
    *(torch.zeros(2, 2).to_sparse(), torch.zeros(30, dtype=torch.bool), torch.zeros(20, dtype=torch.complex64)),
    *(Settings(), Settings(inner=Settings()), [Settings(Colour.RED)], np.float32(0.1), Switch.A | Switch.B),
]
DIFFER = [
    *("a", "b", 1, True, None, [1], [1, 2], {"a": 1}),
    *(torch.zeros(2), torch.ones(2), torch.zeros(20), torch.ones(20), *Colour, *Switch, Switch.A | Switch.B),
    *(np.int64(1), np.int64(2), np.float32(0.5), np.float64(0.5), np.bool_(True), Settings, Settings(), Settings(2)),
    *(Settings(Settings(2)), Settings(Settings(3)), Settings(Colour.BLUE)),
    *(Settings(torch.zeros(20)), Settings(torch.ones(20)), Settings(inner=SGD), Settings(inner=ADAM)),
]


def test_words():
    for x in EQUAL:
        assert _described(x) == _described(copy.deepcopy(x))
    assert _described(Settings(cache=1)) == _described(Settings(cache=2))
    assert _described({"a": 1, "b": 2}) == _described({"b": 2, "a": 1})
    assert len({_described(x) for x in DIFFER}) == len(DIFFER)


def other_files(rank, group, folder):
    built, model, _, _ = make(Run(steps=1, model={"vocab_size": 256}), launched(rank))
    built.fit(model, ByteDataModule(f"{folder}/{rank}", seq_len=64, val_fraction=0, test_fraction=0))


def test_other_files_on_a_rank(pools, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / f"text{rank}").write_bytes(bytes(range(256)) * 2)
    errors = pools(2).errors(ValueError, 2, other_files, str(tmp_path))
    assert all("fingerprint: rank 0 has" in error for error in errors)


# -- settings ----------------------------------------------------------------------------------------------------------
#: different settings of rank 1 of two, and words of the error: options of the Trainer, the strategy, the model
SETTINGS = {
    "learning rate": (
        {"model": {"optimizer": partial(torch.optim.SGD, lr=0.2)}},
        "lr of group 0 of optimizer 0: rank 0 has 0.1, rank 1 has 0.2",
    ),
    "optimizer": ({"model": {"optimizer": ADAM}}, "optimizer 0: rank 0 has SGD, rank 1 has AdamW"),
    "momentum": (
        {"model": {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5)}},
        "momentum of group 0 of optimizer 0: rank 0 has 0, rank 1 has 0.5",
    ),
    "weight decay": (
        {"model": {"optimizer": partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)}},
        "weight_decay of group 0 of optimizer 0: rank 0 has 0, rank 1 has 0.5",
    ),
    "schedule": (
        {"model": {"lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3)}},
        "step_size of scheduler 0: rank 0 has 2, rank 1 has 3",
    ),
    "rotary base": ({"model": {"rotary_base": 5000.0}}, "hyperparameter rotary_base: rank 0 has"),
    "pattern": ({"model": {"pattern": PATTERN.shifted()}}, "hyperparameter pattern: rank 0 has"),
    "dropout": (
        {"model": {"attention_dropout": 0.1}},
        "hyperparameter attention_dropout: rank 0 has 0.0, rank 1 has 0.1",
    ),
    "clipping": ({"gradient_clip_val": 0.5}, "gradient_clip_val: rank 0 has None, rank 1 has 0.5"),
    "clipping algorithm": ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm: rank 0 has"),
    "accumulation": ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: rank 0 has 1, rank 1 has 2"),
    "steps": ({"max_steps": 3}, "max_steps: rank 0 has 2, rank 1 has 3"),
    "precision": ({"precision": "bf16-true"}, "precision: rank 0 has '32-true (Precision)', rank 1 has 'bf16-true ("),
    "mixed precision": ({"precision": "bf16-mixed"}, "rank 0 has '32-true (Precision)', rank 1 has 'bf16-mixed ("),
    "layout": ({"strategy": {"layout": "zigzag"}}, "strategy layout: rank 0 has 'auto', rank 1 has 'zigzag'"),
    "comparisons": ({"strategy": {"check_replicas": 7}}, "strategy check_replicas: rank 0 has 100, rank 1 has 7"),
    "strategy": ({"strategy": {"cls": RingDilatedFSDPStrategy}}, "strategy class: rank 0 has"),
    "dtype": ({"double": True}, "rank 0 has (11, 16) torch.float32, rank 1 has (11, 16) torch.float64"),
    "frozen": ({"frozen": True}, ", frozen"),
    "saving": ({"every": 2}, "saving callback 0: rank 0 has"),
}


class Configured(LongNetLM):
    """A model that may change the dtype of its parameters, or freeze some, after building them."""

    change = None

    def configure_model(self):
        super().configure_model()
        if self.change == "double":
            self.double()
        if self.change == "frozen":
            next(self.parameters()).requires_grad_(False)


def set_up(rank, group, names, fsdp=False):
    """Fit once per named setting, which has a different value on rank 1. Return the errors, or "" if there is none."""
    messages, world = [], launched(rank)
    for name in names:
        own = SETTINGS[name][0] if rank == 1 and name else {}
        options = {"optimizer": SGD, "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)}
        options = {"vocab_size": VOCAB, "dim": 16, "depth": 1, "num_heads": 2, **options, **own.get("model", {})}
        model = Configured(**{"pattern": PATTERN, **options})
        model.change = next((x for x in ("double", "frozen") if x in own), None)
        arguments = dict(own.get("strategy", {}))
        strategy = arguments.pop("cls", RingDilatedFSDPStrategy if fsdp else RingDilatedStrategy)(**arguments)
        trainer_options = {k: v for k, v in own.items() if k not in ("model", "strategy", "double", "frozen", "every")}
        if name == "saving":
            trainer_options |= {
                "enable_checkpointing": True,
                "callbacks": [ModelCheckpoint(every_n_train_steps=own.get("every", 1))],
            }
        built = trainer(strategy, world, **{"max_steps": 2, **trainer_options})
        try:
            built.fit(model, Data(Run()))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_settings_that_differ(pools):
    names = list(SETTINGS)
    for messages in pools(2).run(2, set_up, names):
        for name, message in zip(names, messages, strict=True):
            assert "set up differently, so nothing was trained" in message and SETTINGS[name][1] in message, (
                name,
                message,
            )


def test_settings_that_differ_on_one_of_four_with_sharded_parameters(pools):
    names = ["learning rate", "rotary base"]
    for messages in pools(4).run(4, set_up, ["", *names], True):
        assert not messages[0]
        assert "lr of group 0 of optimizer 0: rank 1 has 0.2; the others have 0.1" in messages[1]
        assert "hyperparameter rotary_base: rank 1 has" in messages[2]


class Unreadable:
    def __getattr__(self, name):
        raise OSError("no such disk")


def unreadable(rank, group):
    compare_settings(lambda: {"a": Unreadable().b} if rank else {"a": "1"})


def test_settings_that_cannot_be_read(pools):
    errors = pools(2).errors(ValueError, 2, unreadable)
    assert all("rank 1 has OSError: no such disk" in error for error in errors)


def test_settings_that_no_rank_can_read_and_other_orders(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(OSError, match="no such disk"):
        compare_settings(lambda: {"a": Unreadable().b})
    digests = []
    monkeypatch.setattr(RankGroup, "gather", lambda peers, value: digests.append(value) or [value])
    for facts in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "2", "b": "1"}):
        compare_settings(lambda facts=facts: facts)
    assert digests[0] == digests[1] != digests[2]


# -- parameters --------------------------------------------------------------------------------------------------------
class Drift(pl.Callback):
    """Changes one thing on rank 1 after a step: the last bit of a weight, an optimizer state, or a buffer.

    The weight is of the last token, which the data do not contain: rounding of an update could remove the difference.
    """

    def __init__(self, what, step=2):
        self.what, self.step = what, step

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_rank == 1 and trainer.global_step == self.step and self.what != "nothing":
            with torch.no_grad():
                x = module.state_dict()["embedding.weight"] if self.what == "weight" else None
                x = module.count if self.what == "buffer" else x
                if self.what == "state":
                    (x, *_) = (s["momentum_buffer"] for s in trainer.optimizers[0].state.values())
                if self.what == "learning rate":
                    trainer.optimizers[0].param_groups[0]["lr"] *= 2
                else:
                    x.view(-1)[-1] = torch.nextafter(x.view(-1)[-1], x.new_tensor(9.0))


class Counting(LongNetLM):
    def __init__(self):
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        sizes = {"vocab_size": VOCAB + 1, "dim": 16, "depth": 1, "num_heads": 2, "tie_embeddings": False}
        super().__init__(PATTERN, optimizer=optimizer, **sizes)
        self.register_buffer("count", torch.zeros(3))


def drifting(rank, group, what, options, folder=None, steps=6, own=()):
    """Return (error, last step, names of checkpoints) of a fit in which rank 1 drifts."""
    model = Counting()
    model._ddp_params_and_buffers_to_ignore = set(own)
    savers = [] if folder is None else [ShardedCheckpoint(folder, every_n_train_steps=3, at_end=False)]
    trainer_options = {
        "max_steps": steps,
        "callbacks": [Drift(what, 3 if what == "state" else 2), *savers],
        "enable_checkpointing": bool(savers),
    }
    built = trainer(RingDilatedStrategy(**options), launched(rank), **trainer_options)
    try:
        built.fit(model, Data(Run(batch_size=options.get("regions", 1))))
    except RuntimeError as error:
        return str(error), built.global_step, sorted(x.name for x in Path(folder or "/nowhere").glob("step-*"))
    return "", built.global_step, []


@pytest.mark.parametrize("what", ["weight", "learning rate"])
def test_parameters_that_drift(pools, what):
    for error, step, _ in pools(2).run(2, drifting, what, {"check_replicas": 2}):
        assert "ranks [0, 1] of the job hold unlike values" in error and "embedding.weight" in error, error
        assert step <= 4
    assert RingDilatedStrategy()._options.check_replicas == 100


def test_each_ranks_own_parameters_are_no_settings():
    model = torch.nn.Linear(2, 3)
    model._ddp_params_and_buffers_to_ignore = {"bias"}
    assert list(parameters_of(model)) == ["parameter weight"]


def test_a_difference_is_named_though_later_steps_removed_it(monkeypatch):
    model = torch.nn.Linear(2, 3)
    other = {name: int(bits(p)) + (name == "bias") for name, p in model.named_parameters()}
    sums = torch.tensor([*other.values()])

    def gather(every, own, group):
        every[:] = [own, other]

    monkeypatch.setattr(dist, "all_reduce", lambda x, *_, **__: x.copy_(x.maximum(torch.cat([sums, ~sums]))))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    replicas = Replicas(model, None, None)
    replicas._post()
    with torch.no_grad():
        model.bias.view(torch.int32)[0] += 1
    with pytest.raises(RuntimeError, match=r"unlike values of 1 tensors \(bias\)"):
        replicas.settle()


def test_regions_differ_between_outer_steps(pools):
    options = {"check_replicas": 1, "regions": 2, "outer": OuterSteps(every=10)}
    assert all(x == ("", 3, []) for x in pools(4).run(4, drifting, "nothing", options, None, 3))


def test_what_is_each_ranks_own_may_differ(pools):
    for what, own in (("buffer", ()), ("weight", ("embedding.weight",))):
        assert all(x == ("", 6, []) for x in pools(2).run(2, drifting, what, {"check_replicas": 1}, None, 6, own))


@pytest.mark.parametrize("what", ["weight", "state"])
def test_no_checkpoint_is_a_mixture(pools, tmp_path, what):
    for error, step, files in pools(2).run(2, drifting, what, {"check_replicas": None}, str(tmp_path)):
        assert "ranks [0, 1] of the job hold unlike values" in error and step == 3 and not files
        assert ("state_dict." if what == "weight" else "optimizer_0.state.") in error


def saved(rank, group, folder):
    """Fit with one of Lightning's own checkpoints."""
    saver = ModelCheckpoint(folder, every_n_train_steps=3)
    built = trainer(
        RingDilatedStrategy(check_replicas=None),
        launched(rank),
        max_steps=6,
        enable_checkpointing=True,
        callbacks=[Drift("weight"), saver],
    )
    built.fit(Counting(), Data(Run()))


def test_lightnings_checkpoint_is_no_mixture(pools, tmp_path):
    for error in pools(2).errors(RuntimeError, 2, saved, str(tmp_path)):
        assert "ranks [0, 1] of the job hold unlike values" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (0,)])
def test_bits_see_any_bit(dtype, shape):
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    for y in (x, x.t() if x.ndim == 2 else x[..., None].expand(*shape, 1)[..., 0]):
        before = int(bits(y))
        assert before == int(bits(y.clone()))
        for i in range(x.numel()):
            raw = x.view(-1)[i : i + 1].view(torch.uint8)
            raw[0] ^= 1
            assert int(bits(y)) != before
            raw[0] ^= 1


# -- balance -----------------------------------------------------------------------------------------------------------
HYBRID = DilatedPattern.hybrid(2, 4, local=8, global_every=2)


def warned(rank, group, pattern, options, kind):
    """Return the warnings about layouts in a fit, each with its step."""
    hints, world = [], launched(rank)
    model = (LongNetMLM if kind == "mlm" else LongNetLM)(pattern, vocab_size=VOCAB, dim=16, depth=2, num_heads=4)
    built = trainer(RingDilatedStrategy(**options), world, max_steps=2)
    note = lambda text: hints.append((str(text), built.global_step))  # noqa: E731
    with mock.patch("lightning_dilated.strategy.sequence_strategy.rank_zero_warn", note):
        built.fit(model, Data(Run(kind="unshifted" if kind == "mlm" else kind)))
    return hints


UNEVEN = "the busiest of 2 ranks with layout='contiguous' computes "


@pytest.mark.parametrize(
    "pattern, options, kind, times",
    [
        (HYBRID, {}, "whole", "1."),
        (DilatedPattern.dense(), {}, "whole", "1.49 times"),  # 610 of the 820 pairs are the last rank's
        (DilatedPattern.dense(), {}, "documents", "1.1"),
        (DilatedPattern.dense(), {"layout": "zigzag"}, "whole", None),
        (DilatedPattern.dense(), {"head_size": 2}, "whole", None),
        (DilatedPattern.dense(), {"exchange": "switch"}, "whole", None),
        (DilatedPattern.longnet([8], [1]), {}, "whole", None),
        (DilatedPattern.dense(), {}, "mlm", None),
    ],
    ids=str,
)
def test_the_layout_that_balances_is_named_once(pools, pattern, options, kind, times):
    first, *other_ranks = pools(2).run(2, warned, pattern, options, kind)
    assert other_ranks == [[]]
    if times is None:
        assert not first
        return
    ((hint, step),) = first
    assert UNEVEN + times in hint and "trainer.strategy.init_args.layout: zigzag" in hint and step == 0


class Validated(Plain):
    """Logs a validation loss, averaged over ranks."""

    def validation_step(self, batch, batch_idx):
        self.log("val", loss_share(batch["x"].sum(), batch["x"].numel()), sync_dist=True)


def validated(rank, group, size, batches):
    built = trainer(RingDilatedStrategy(sequence_size=1), launched(rank), limit_val_batches=batches)
    loader = DataLoader(Numbers(), sampler=range(size if rank else 4))
    with mock.patch.object(built._data_connector, "_requires_distributed_sampler", lambda loader: False):
        try:
            built.validate(Validated(), loader, verbose=False)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "val" in built.callback_metrics


def test_losses_of_unlike_numbers_of_batches(pools):
    """Without this error, a rank with more batches would wait for the other rank until the timeout."""
    for error in pools(2).run(2, validated, 3, None):
        assert "the ranks have [4, 3] batches of the stage 'val'" in error and "torchmetrics" in error
    assert pools(2).run(2, validated, 3, 3) == [True, True]
    assert pools(2).run(2, validated, 4, None) == [True, True]


def test_a_rank_without_any_validation_batch(pools):
    """Lightning skips the validation loop on a rank without batches, so others would wait to average their metric."""
    for error in pools(2).run(2, validated, 0, None):
        assert "the ranks have [4, 0] batches of the stage 'val'" in error and "limit_val_batches=0" in error
    assert pools(2).run(2, validated, 0, 0) == [False, False]


def trained(rank, group, options):
    built = trainer(RingDilatedStrategy(sequence_size=1), launched(rank), **options)
    loader = DataLoader(Numbers(), sampler=range(4 - rank))
    with mock.patch.object(built._data_connector, "_requires_distributed_sampler", lambda loader: False):
        try:
            built.fit(Plain(), loader)
        except ValueError as error:
            return str(error)
    return built.global_step


def test_training_on_unlike_numbers_of_batches(pools):
    for error in pools(2).run(2, trained, {"max_epochs": 1}):
        assert "the ranks have [4, 3] batches of the stage 'train'" in error
    assert pools(2).run(2, trained, {"max_epochs": 2, "limit_train_batches": 3}) == [6, 6]
    assert pools(2).run(2, trained, {"max_steps": 3}) == [3, 3]


def test_a_stream_of_unknown_length(pools):
    assert pools(2).run(2, streamed) == [2, 2]


def streamed(rank, group):
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=2)
    loader = DataLoader(list(Numbers()[i] for i in range(4)))
    built.fit(Plain(), Stream(loader))
    return built.global_step


class Stream:
    """An iterable of batches that has no length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)
