"""Private names of torch and Lightning that `_compat` uses: each still exists, takes what we pass, and does its work.

A test that fails here names the function of `_compat` that broke, and so what the package can no longer do.
"""

import copyreg
import inspect
import os
import pickle
import signal
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import launchers
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dilated._compat import lightning as ours
from lightning_dilated._compat import torch as torchs


def parameters(function):
    return list(inspect.signature(function).parameters)


def has(owner, name, broken):
    """Fails with a sentence that says what no longer works."""
    assert hasattr(owner, name), f"{getattr(owner, '__name__', owner)} has no {name} any more: {broken}."


@pytest.fixture(scope="module")
def trainer():
    """A Trainer that has not run."""
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)


# -- Lightning: classes ------------------------------------------------------------------------------------------------
#: attributes of objects, not of classes
MADE = {
    *("_ddp_kwargs", "_device_mesh", "_save_distributed_checkpoint"),
    *("_throughputs", "_t0s", "_lengths", "_samples", "_batches"),
}


@pytest.mark.parametrize("cls, name", [(cls, name) for cls, names in ours.OVERRIDDEN.items() for name in names])
def test_names_that_ours_override(cls, name):
    made = (lambda: cls(batch_size_fn=len)) if cls is pl.callbacks.ThroughputMonitor else cls
    has(
        made() if name in MADE else cls,
        name,
        f"what ours put in its place, or read from it, has no effect on {cls.__name__}",
    )


SIGNATURES = {
    "_setup_model": ["self", "model"],
    "_configure_launcher": ["self"],
    "_setup_distributed": ["self"],
    "_get_process_group_backend": ["self"],
    "_start": ["self", "trainer"],
    "_update": ["self", "trainer", "pl_module", "batch", "iter_num"],
}


def test_signatures_of_what_ours_override():
    for cls, names in ours.OVERRIDDEN.items():
        for name in SIGNATURES.keys() & set(names):
            found = parameters(getattr(cls, name))
            assert found == SIGNATURES[name], f"{cls.__name__}.{name} takes {found} now: ours takes {SIGNATURES[name]}"


def test_options_of_strategies():
    strategy = pl.strategies.DDPStrategy(bucket_cap_mb=3, process_group_backend="gloo")
    words = (
        "DDPStrategy does not keep DDP's keywords in _ddp_kwargs: gradients get no communicator and bucket of their own"
    )
    assert ours.ddp_options(strategy) == {"bucket_cap_mb": 3}, words
    assert ours.process_group_backend(strategy) == "gloo", (
        "_get_process_group_backend does not give the backend any more"
    )
    parallel = pl.strategies.ModelParallelStrategy
    words = (
        "_save_distributed_checkpoint is not what it was: ShardedCheckpoint does not refuse strategies with one file"
    )
    assert ours.writes_one_file(parallel(save_distributed_checkpoint=False)), words
    assert not ours.writes_one_file(parallel()) and not ours.writes_one_file(strategy), words


def test_device_mesh_of_a_module():
    module = pl.LightningModule()
    ours.set_device_mesh(module, "a mesh")
    assert module.device_mesh == "a mesh", (
        "LightningModule.device_mesh is not _device_mesh: configure_model finds no mesh"
    )


def test_modules_on_meta_and_elsewhere():
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2, device="meta")

    module = Module()
    ours.set_module_device(module, torch.device("meta"))
    assert module.device.type == "meta", (
        "_update_properties does not set LightningModule.device: it names the wrong device"
    )
    ours.materialize(module, torch.device("cpu"))
    assert module.layer.weight.device.type == "cpu", "_materialize_distributed_module leaves meta parameters"


def test_states_of_optimizers_move():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    ours.optimizers_to_device([optimizer], torch.device("meta"))
    device = optimizer.state[parameter]["exp_avg"].device.type
    assert device == "meta", "_optimizers_to_device moves nothing: cpu_offload leaves states on the GPU"


def test_metrics_forget_updates():
    metric = MeanMetric()
    metric.update(1.0)
    metric.compute()
    ours.set_update_count(metric, 0)
    assert metric.update_count == 0 and metric._computed is None, (
        "torchmetrics counts updates elsewhere than _update_count"
    )


def test_destroying_at_exit(monkeypatch):
    calls = []
    monkeypatch.setattr(ours.atexit, "register", calls.append)
    ours.destroy_process_group_at_exit()
    assert parameters(calls[0]) == [], "_destroy_dist_connection takes arguments now"


# -- Lightning: the Trainer's connectors -------------------------------------------------------------------------------
def test_checkpoints_of_a_trainer(trainer):
    connector = trainer._checkpoint_connector
    has(connector, "dump_checkpoint", "ShardedCheckpoint has no state to write")
    has(connector, "resume_start", "ShardedCheckpoint(resume=...) cannot load")
    assert "weights_only" in parameters(connector.dump_checkpoint), (
        "dump_checkpoint(weights_only=) is not taken any more"
    )
    found = parameters(connector.resume_start)[0]
    assert found == "checkpoint_path", f"resume_start takes {found} first: resuming would pass it a path"


def test_order_of_training_samples(trainer):
    """`_data_connector._resolve_sampler` takes what ours passes on, and is replaced once."""
    connector, calls = trainer._data_connector, []
    has(connector, "_resolve_sampler", "training data of a loader with shuffle=False are shuffled")
    found = parameters(connector._resolve_sampler)
    assert found == ["dataloader", "shuffle", "mode"], f"_resolve_sampler takes {found}: samplers would not be chosen"
    for _ in range(2):
        ours.replace_sampler_choice(trainer, lambda choose: lambda *args, **kw: calls.append(kw) or choose(*args, **kw))
    loader = DataLoader([1, 2])
    connector._resolve_sampler(loader, shuffle=False, mode=None)
    assert calls == [{"shuffle": False, "mode": None}]
    del connector._resolve_sampler


def test_steps_of_a_trainer(trainer):
    loop = trainer.fit_loop.epoch_loop
    has(loop, "_batches_that_stepped", "values that callbacks log themselves get another step than Lightning's")
    has(loop, "_should_accumulate", "a signal ends a fit between micro-batches, and their gradients are lost")
    has(trainer._logger_connector, "should_update_logs", "ThroughputMonitor does not know which batches are logged")
    assert ours.logged_step(trainer) == 0
    trainer.fit_loop._combined_loader, loop.batch_progress.current.ready = SimpleNamespace(), 1
    trainer.accumulate_grad_batches, loop.max_batches = 2, 10
    assert isinstance(ours.logs_this_step(trainer), bool)


SIGNALS = {
    "epoch_loop": {"advance": ["data_fetcher"], "_broadcast_sigterm_tensor": []},
    "_signal_connector": {
        "register_signal_handlers": [], "_sigterm_notifier_fn": ["signum", "_"], "_slurm_sigusr_handler_fn": ["signum", "_"]
    },
}  # fmt: skip


def test_signals_of_a_trainer(trainer):
    owners = {"epoch_loop": trainer.fit_loop.epoch_loop, "_signal_connector": trainer._signal_connector}
    for owner, names in SIGNALS.items():
        for name, taken in names.items():
            has(owners[owner], name, "signals are handled by Lightning, whatever a rank is doing")
            found = parameters(getattr(owners[owner], name))
            assert found == taken, f"{owner}.{name} takes {found}: what replaces it takes {taken}"
    hooks, calls = ours.SignalHooks(trainer), []
    hooks.replace(calls.append, lambda: calls.append("register"), lambda *x: calls.append("term"), calls.append)
    before = signal.getsignal(signal.SIGTERM)
    trainer.fit_loop.epoch_loop.advance("a fetcher")
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    trainer._signal_connector.register_signal_handlers()
    assert calls == ["a fetcher", "register"]
    try:
        hooks.register()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        words = "SIGTERM does not come to _sigterm_notifier_fn any more: it ends ranks one by one"
        assert calls[2:] == ["term"], words
    finally:
        trainer._signal_connector.teardown()
        signal.signal(signal.SIGTERM, before)
    hooks.restore()
    pickle.dumps(trainer._signal_connector)
    assert not {"advance", "_broadcast_sigterm_tensor"} & set(vars(trainer.fit_loop.epoch_loop))
    ours.set_received_sigterm(trainer)
    assert trainer.received_sigterm, "Trainer.received_sigterm is not _signal_connector's: fits do not end for a signal"
    trainer._signal_connector.received_sigterm = False


def test_the_observer_of_processes():
    has(launchers, "_SubprocessScriptLauncher", "a rank 0 that saves after a signal is killed by its observer")
    launcher = launchers._SubprocessScriptLauncher.__new__(launchers._SubprocessScriptLauncher)
    watched = launcher.procs = ["a process"]
    ours.forget_launched_processes(launcher)
    assert watched == [] and launcher.procs == ["a process"]
    source = inspect.getsource(launchers._SubprocessScriptLauncher)
    assert "_launch_process_observer(self.procs)" in source, "the launcher's observer watches another list than procs"


# -- torch -------------------------------------------------------------------------------------------------------------
def test_flattened_mesh_and_store():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    flat = torchs.flatten_mesh(init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")), "both")
    assert flat.ndim == 1 and dist.get_world_size(flat.get_group()) == 1, (
        "DeviceMesh._flatten gives no group of all axes"
    )
    store = torchs.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value", "_get_default_store gives no store: ranks cannot leave why they ended"


def test_settings_of_the_compiler():
    usual = torchs.uses_autograd_cache()
    with torchs.use_autograd_cache(not usual):
        assert torchs.uses_autograd_cache() is not usual, (
            "enable_autograd_cache is not read from torch._functorch.config"
        )
    assert torchs.uses_autograd_cache() is usual
    with torchs.whole_graphs_in_ddp():
        assert torch._dynamo.config.optimize_ddp is False, "torch._dynamo.config.optimize_ddp is gone: DDP cuts blocks"


def test_base_classes():
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm2d, nn.GroupNorm):
        assert issubclass(kind, torchs.TOKEN_NORMS), f"{kind} has another base class: refuse_mixing lets it through"
    for kind in (nn.MaxPool1d, nn.AvgPool2d, nn.LPPool1d):
        assert issubclass(kind, torchs.POOLS), f"{kind} has another base class: refuse_mixing lets it through"
    for kind in (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool2d):
        assert issubclass(kind, torchs.ADAPTIVE_POOLS), f"{kind} has another base class: refuse_mixing lets it through"
    for kind in (nn.Conv1d, nn.ConvTranspose2d):
        assert issubclass(kind, torchs.CONVOLUTION), f"{kind} has another base class: refuse_mixing lets it through"


def test_tensors_of_a_module():
    module = nn.BatchNorm1d(2)
    torchs.map_tensors(module, lambda x: x.double() if x.is_floating_point() else x)
    kinds = {x.dtype for x in (*module.parameters(), module.running_mean)}
    assert kinds == {torch.float64}, (
        "nn.Module._apply does not reach parameters and buffers: rest_to_device leaves some"
    )


def test_dataset_of_a_loader():
    loader = DataLoader([1, 2])
    with pytest.raises(ValueError):
        loader.dataset = [3, 4]  # why `set_dataset` is needed
    torchs.set_dataset(loader, [3, 4])
    assert [int(x) for x in loader] == [3, 4], "DataLoader does not read its dataset from the attribute"


def test_records_of_metadata():
    info = torchs.StorageInfo("__0_0.distcp", 3, 5)
    words = "filesystem._StorageInfo has other fields: `.metadata` cannot be checked"
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 3, 5), words
    formats = torchs.MemoryFormatEncoding
    assert formats is metadata._MEM_FORMAT_ENCODING and formats(0) in formats, (
        "_MEM_FORMAT_ENCODING is no enum of numbers"
    )
    function, arguments = copyreg.dispatch_table[torch.layout](torch.strided)
    name = f"{function.__module__}.{function.__qualname__}"
    words = f"layouts are pickled by {name}{arguments} now: the reader refuses `.metadata` that names it"
    assert (name, arguments) == ("torch.serialization._get_layout", ("torch.strided",)), words
    assert torchs.stored_layout(*arguments) is torch.strided


def test_setting_a_nested_value():
    state = {"a": {"b": 1}}
    torchs.set_nested(state, ("a", "b"), 2)
    assert state == {"a": {"b": 2}}, "_nested_dict.set_element sets nothing: values that are no tensors are not loaded"


def test_graphs_and_traced_tensors():
    x = torch.ones(2)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    says = "torch's classes of {} moved: see _compat/torch.py"
    assert torchs.is_fake(fake) and not torchs.is_fake(x), says.format("fake tensors")
    op = torch.ops.aten.add.Tensor
    assert torchs.is_op(op) and not torchs.is_op(torch.add), says.format("ops")
    assert torchs.map_tree(lambda y: y + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}, says.format("trees")
