"""Regions that train separately between outer steps, compared with a simulation of all regions in one process."""

import functools
import warnings
from itertools import islice
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import LongNetLM, OuterSteps, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.checkpoint.folder import read_whole
from lightning_dilated.data import ByteDataModule
from lightning_dilated.data.sampler import ResumableSampler

from .runs import PATTERN, Collate, Record, Run, Tokens, full, launched, make, trainer, write_bytes

pytestmark = pytest.mark.full


def simulated(run, regions, outer, data_ranks):
    """Train all regions in one process, one after the other, as the oracle.

    Args:
        run: its batch size is the sum over all data ranks.
        outer: OuterSteps; only its numbers are used, not its code.
        data_ranks: number of sequences that a region trains at a time.

    Returns:
        The losses of each region's steps, and parameters of each region and of their mean after the last step.
    """
    models = [start(run) for _ in range(regions)]
    optimizers = [model.configure_optimizers() for model in models]
    names = [name for name, _ in models[0].named_parameters()]
    now = [dict(model.named_parameters()) for model in models]
    shared = {name: now[0][name].detach().clone() for name in names}
    sgd = torch.optim.SGD(shared.values(), outer.lr, outer.momentum, nesterov=outer.momentum > 0)
    batches = [
        list(islice(batches_of(run, region, regions, data_ranks), run.steps * run.accumulate))
        for region in range(regions)
    ]
    losses, sent = [[] for _ in models], {}
    for step in range(1, run.steps + 1):
        for model, optimizer, batch, out in zip(models, optimizers, batches, losses, strict=True):
            optimizer.zero_grad()
            for part in batch[(step - 1) * run.accumulate : step * run.accumulate]:
                total, count = model.loss_terms(model._shifted(part))
                (total / count / run.accumulate).backward()
                out.append(float(total / count))
            if run.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
        with torch.no_grad():
            for name in names:
                if step <= outer.warmup:
                    shared[name].copy_(sum(parameters[name] for parameters in now) / regions)
                    for parameters in now:
                        parameters[name].copy_(shared[name])
                    continue
                since = step - part_of(names, name, outer.fragments) * outer.every // outer.fragments
                if since % outer.every == 0:
                    mean = sum(parameters[name] for parameters in now) / regions
                    sent[name] = shared[name] - mean
                if since % outer.every == outer.delay and name in sent:
                    shared[name].grad = sent.pop(name)
                    sgd.step()
                    shared[name].grad = None
                    for parameters in now:
                        own = parameters[name]
                        own.copy_(outer.mix * own + (1 - outer.mix) * shared[name])
    mean = {name: sum(parameters[name] for parameters in now).detach() / regions for name in names}
    return losses, [{n: p.detach() for n, p in parameters.items()} for parameters in now], mean


def start(run):
    """Return the model of a run as the Trainer builds it, with weights drawn in float64."""
    model = make(run, 1)[1]
    pl.seed_everything(4, verbose=False)
    torch.set_default_dtype(torch.float64)
    model.configure_model()
    torch.set_default_dtype(torch.float32)
    return model


def batches_of(run, region, regions, data_ranks):
    """Yield the batches of a region's steps, each joined over the data ranks of the region."""
    data, count = Tokens(run), regions * data_ranks
    loaders = []
    for rank in range(region * data_ranks, (region + 1) * data_ranks):
        sampler = ResumableSampler(data, num_replicas=count, rank=rank, shuffle=True, drop_last=True)
        size = run.batch_size // count
        loaders.append(DataLoader(data, size, sampler=sampler, collate_fn=Collate(run), drop_last=True))
    epoch = 0
    while True:
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for parts in zip(*loaders, strict=True):
            yield {key: torch.cat([part[key] for part in parts]) for key in ("tokens", "labels")}
        epoch += 1


def part_of(names, name, fragments):
    """Return the fragment of a parameter: units (a block, or a module around the blocks) are assigned in rotation."""
    units = list(dict.fromkeys(unit(x) for x in names))
    return units.index(unit(name)) % fragments


def unit(name):
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


class Own(pl.Callback):
    """Records this region's own parameters before the first step and after the last step."""

    def on_train_start(self, trainer, pl_module):
        self.before = {name: full(p).detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_end(self, trainer, pl_module):
        self.parameters = {name: full(p).detach().clone() for name, p in pl_module.named_parameters()}


def trained(rank, group, run, outer, **options):
    """Return (losses, the region's own parameters, parameters after the fit) of this rank."""
    own = Own()
    settings = {"regions": 2, "outer": outer, **run.strategy}
    built, model, data, record = make(
        run.but(strategy=settings), launched(rank), callbacks=[own], limit_val_batches=0, **options
    )
    built.fit(model, data)
    return record.losses, own.parameters, {name: p.detach().clone() for name, p in model.named_parameters()}


SETTINGS = {
    "every step": OuterSteps(every=1),
    "plain": OuterSteps(every=3),
    "no momentum": OuterSteps(every=2, lr=1.0, momentum=0.0),
    "mix": OuterSteps(every=2, mix=0.25),
    "delay": OuterSteps(every=3, delay=2),
    "streaming": OuterSteps(every=4, fragments=2, delay=1, mix=0.5),
    "warmup": OuterSteps(every=3, fragments=2, delay=1, mix=0.5, warmup=5),
    "many fragments": OuterSteps(every=4, fragments=4, delay=3, mix=0.5),
    "on the host": OuterSteps(every=3, fragments=2, delay=1, offload=True),
}
WAYS = {"sequences of two": {}, "data parallel": {"sequence_size": 1}}


CASES = [(name, way) for name in SETTINGS for way in WAYS]
#: slow tests; the other cases cover the same features
SLOW = ("plain", "mix", "many fragments")
CI = {(name, "sequences of two") for name in SETTINGS if name not in SLOW} | {("streaming", "data parallel")}


@pytest.mark.parametrize(
    "name, way", [pytest.param(*case, marks=[] if case in CI else pytest.mark.slow) for case in CASES]
)
def test_equals_a_simulation(pools, name, way):
    data_ranks = 2 if WAYS[way] else 1
    run = Run(steps=10, batch_size=2 * data_ranks, clip=0.5, masked=0.3)
    losses, own, mean = simulated(run, 2, SETTINGS[name], data_ranks)
    results = pools(4).run(4, trained, run.but(strategy=WAYS[way]), SETTINGS[name])
    apart = max((own[0][n] - own[1][n]).abs().max() for n in mean)
    assert apart > 1e-4 if name not in ("every step", "no momentum") else apart == 0
    for rank, (got_losses, got_own, got_mean) in enumerate(results):
        same(got_losses, losses[rank // 2], 1e-6)  # Lightning logs in fp32
        same(got_own, own[rank // 2])
        same(got_mean, mean)


@pytest.mark.slow
def test_steps_of_several_batches(pools):
    run, outer = Run(steps=5, batch_size=2, accumulate=2), SETTINGS["streaming"]
    losses, own, mean = simulated(run, 2, outer, 1)
    for rank, (got_losses, got_own, got_mean) in enumerate(pools(4).run(4, trained, run, outer)):
        same(got_losses, losses[rank // 2], 1e-6)
        same(got_own, own[rank // 2])
        same(got_mean, mean)


def test_one_region_takes_outer_steps_too(pools):
    run, outer = Run(steps=5, batch_size=1), SETTINGS["streaming"]
    losses, own, _ = simulated(run, 1, outer, 1)
    for got_losses, got_own, got in pools(2).run(2, trained, run.but(strategy={"regions": 1}), outer):
        same(got_losses, losses[0], 1e-6)
        same(got_own, own[0])
        same(got, own[0])


def test_outer_step_after_each_plain_inner_step_is_data_parallel_training(pools):
    run = Run(steps=4, batch_size=2, model={"optimizer": sgd})
    one = pools(4).run(4, trained, run.but(strategy={"sequence_size": 2, "regions": 1}), None)
    two = pools(4).run(4, trained, run, OuterSteps(every=1, lr=1.0, momentum=0.0))
    for (_, want, _), (_, got, _) in zip(one, two, strict=True):
        same(got, want)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def same(got, want, tol=1e-12):
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")
    else:
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=tol, atol=0)


# -- checkpoints -------------------------------------------------------------------------------------------------------
def part_of_run(rank, group, folder, settings, stop, ckpt, how, validate=None):
    """Return this rank's results of a run up to step `stop`, and the path of the checkpoint at its end."""
    pl.seed_everything(1, verbose=False)
    world, record, own = launched(rank), Record(), Own()
    data = ByteDataModule(folder, seq_len=64, batch_size=1, val_fraction=0.2, test_fraction=0)
    model = LongNetLM(pattern=PATTERN, dim=16, depth=1)
    kind, settings = (RingDilatedFSDPStrategy, {}) if settings == "sharded" else (RingDilatedStrategy, settings)
    saved = f"{folder}.{how}.{stop}.{world}"
    callbacks = [record, own]
    if how == "folder":
        callbacks.append(ShardedCheckpoint(saved, every_n_train_steps=None))
    if how == "validation":
        callbacks.append(pl.callbacks.ModelCheckpoint(saved, filename="{step}"))
        saved, validate = f"{saved}/step={stop}.ckpt", 2
    options = (
        {"val_check_interval": validate, "check_val_every_n_epoch": None} if validate else {"limit_val_batches": 0}
    )
    built = trainer(
        kind(**settings),
        world,
        max_steps=stop,
        callbacks=callbacks,
        precision="64-true" if kind is RingDilatedStrategy else "32-true",
        enable_checkpointing=how in ("folder", "validation"),
        num_sanity_val_steps=0,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built.fit(model if kind is RingDilatedStrategy else model.double(), data, ckpt_path=ckpt)
    if how == "file":
        built.save_checkpoint(saved)
    return {
        "rank": rank,
        "losses": record.losses,
        "before": own.before,
        "own": own.parameters,
        "mean": {name: full(p).detach().clone() for name, p in model.named_parameters()},
        "warned": " ".join(str(x.message) for x in caught),
        "saved": saved,
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_bytes(tmp_path_factory.mktemp("data") / "text", 4000)


STREAMING = {"regions": 2, "outer": OuterSteps(every=4, fragments=2, delay=3, mix=0.5)}


@pytest.fixture(scope="module")
def undisturbed(pools, text):
    return pools(4).run(4, part_of_run, text, STREAMING, 11, None, None)


@pytest.fixture(scope="module")
def begun(pools, text):
    """Return a function: `begun(how, stop)` returns the results of the first steps of the undisturbed run."""

    @functools.cache
    def get(how, stop):
        return pools(4).run(4, part_of_run, text, STREAMING, stop, None, how)

    return get


@pytest.mark.parametrize("how", ["file", "folder", pytest.param("validation", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_goes_on_exactly(pools, text, undisturbed, begun, how, stop):
    """Resume while fragments are in flight: one is sent in steps 6 to 9, and a second one in steps 8 to 11."""
    first = begun(how, stop)
    resumed = pools(4).run(4, part_of_run, text, STREAMING, 11, first[0]["saved"], None)
    for one, two, whole in zip(first, resumed, undisturbed, strict=True):
        assert one["losses"] + two["losses"] == whole["losses"] and len(whole["losses"]) == 11
        same(two["before"], one["own"])
        same(two["own"], whole["own"])
        same(two["mean"], whole["mean"])


def test_validation_changes_nothing(pools, text, undisturbed):
    for got, want in zip(pools(4).run(4, part_of_run, text, STREAMING, 11, None, None, 2), undisturbed, strict=True):
        assert got["losses"] == want["losses"]
        same(got["own"], want["own"])


@pytest.mark.parametrize("how", ["file", "folder"])
@pytest.mark.parametrize(
    "ranks, settings, words",
    [
        (2, {**STREAMING, "regions": 1}, "2 region(s) with outer steps, this run has 1. Each continues from the mean"),
        (2, {}, "this run has 1 without. Each continues from the mean of their parameters, with the inner"),
        (4, {**STREAMING, "regions": 4}, "of the first. Shared parameters and outer momentum continue."),
    ],
)
def test_goes_on_with_other_regions(pools, text, begun, how, ranks, settings, words):
    first = begun(how, 6)[0]
    for got in pools(ranks).run(ranks, part_of_run, text, settings, 8, first["saved"], None):
        same(got["before"], first["mean"])
        assert len(got["losses"]) == 2
        assert words in got["warned"] or got["rank"] > 0


def test_goes_on_with_sharded_parameters(pools, text, begun):
    first = begun("folder", 6)[0]
    for got in pools(2).run(2, part_of_run, text, "sharded", 8, first["saved"], None):
        same(got["before"], first["mean"])
        assert "this run has 1 without. Each continues from the mean" in got["warned"] or got["rank"] > 0


def test_goes_on_with_another_schedule(pools, text, begun):
    """Under a different schedule, shared parameters and momentum are kept, and a fragment in flight is discarded."""
    other = {**STREAMING, "outer": OuterSteps(every=4, fragments=2, delay=1, mix=0.5)}
    first = begun("file", 6)
    for one, got in zip(first, pools(4).run(4, part_of_run, text, other, 8, first[0]["saved"], None), strict=True):
        same(got["before"], one["own"])
        assert (
            "under way between regions are dropped: every, fragments, delay or warmup" in got["warned"] or got["rank"]
        )


def test_files_and_folders_hold_the_same(begun):
    file = torch.load(begun("file", 6)[0]["saved"], weights_only=True)
    (folder,) = Path(begun("folder", 6)[0]["saved"]).glob("step-*")
    assert {*file["regions"]} == {"0", "1"} and {*file["outer_steps"]["tensors"]} == {"shared", "momentum", "sent"}
    for region in range(2):
        read = read_whole(folder, 2, region)
        assert {*read["regions"]} == {str(region)}
        for name in ("state_dict", "optimizer_states"):
            alike(read[name], file[name])
            alike(read["regions"][str(region)][name], file["regions"][str(region)][name])
        alike(read["outer_steps"], file["outer_steps"])
    alike(file["optimizer_states"], file["regions"]["0"]["optimizer_states"])
    assert read_whole(folder)["regions"] == {}


def alike(got, want):
    """Assert that nested values are equal."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            alike(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, two in zip(got, want, strict=True):
            alike(one, two)
    else:
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
