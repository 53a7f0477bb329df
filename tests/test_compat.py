"""Private names of torch and Lightning in `_compat`: each exists, accepts our arguments, and works.

A failing test names the function of `_compat` that broke, and the feature that would be lost.
"""

import copy
import copyreg
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import launchers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dilated._compat import lightning as ours
from lightning_dilated._compat import torch as torchs
from lightning_dilated.ext._compat import torch as ext_torch


def parameters(function):
    return list(inspect.signature(function).parameters)


def has(owner, name, broken):
    """Fail with a sentence that names the broken feature, if `owner` lacks `name`."""
    assert hasattr(owner, name), f"{getattr(owner, '__name__', owner)} has no {name} any more: {broken}."


@pytest.fixture(scope="module")
def trainer():
    """A Trainer that has not run yet."""
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_autograd_within_op():
    """The backward of a recurrence differentiates its forward. Without this function, autograd would record no graph."""
    library = torch.library.Library("lightning_dilated_test", "DEF")
    library.define("slope(Tensor x) -> Tensor")

    def slope(x):
        with ext_torch.autograd_within_op(), torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.sin().sum(), x)[0]

    library.impl("slope", slope, "CompositeExplicitAutograd")
    x = torch.randn(3, requires_grad=True)
    op = torch.ops.lightning_dilated_test.slope.default
    assert torch.equal(torchs.below_autograd(op, x), x.detach().cos())


# -- Lightning: classes ------------------------------------------------------------------------------------------------
#: private methods and attributes of Lightning's classes that this package overrides or uses on `self`: there is no
#: public hook to refuse sizes before processes start, to set DDP's process group and buckets, to set up without
#: Lightning's own mesh, to name an epoch in the progress bar, or to time batches without waiting for the GPU
OVERRIDDEN = {
    pl.strategies.DDPStrategy: ("_configure_launcher", "_get_process_group_backend", "_ddp_kwargs"),
    pl.strategies.ModelParallelStrategy: (
        *("_configure_launcher", "_get_process_group_backend", "_setup_distributed", "_device_mesh"),
        "_save_distributed_checkpoint",
    ),
    pl.callbacks.RichProgressBar: ("_get_train_description",),
    pl.callbacks.ThroughputMonitor: (
        *("_start", "_update", "_throughputs", "_t0s"),
        *("_lengths", "_samples", "_batches"),
    ),
}
#: attributes that exist on objects, not on classes
MADE = {
    *("_ddp_kwargs", "_device_mesh", "_save_distributed_checkpoint"),
    *("_throughputs", "_t0s", "_lengths", "_samples", "_batches"),
}


@pytest.mark.parametrize("cls, name", [(cls, name) for cls, names in OVERRIDDEN.items() for name in names])
def test_names_that_ours_override(cls, name):
    build = (lambda: cls(batch_size_fn=len)) if cls is pl.callbacks.ThroughputMonitor else cls
    has(
        build() if name in MADE else cls,
        name,
        f"what ours put in its place, or read from it, has no effect on {cls.__name__}",
    )


SIGNATURES = {
    "_configure_launcher": ["self"],
    "_setup_distributed": ["self"],
    "_get_process_group_backend": ["self"],
    "_start": ["self", "trainer"],
    "_update": ["self", "trainer", "pl_module", "batch", "iter_num"],
}


def test_signatures_of_what_ours_override():
    for cls, names in OVERRIDDEN.items():
        for name in SIGNATURES.keys() & set(names):
            takes = parameters(getattr(cls, name))
            assert takes == SIGNATURES[name], f"{cls.__name__}.{name} takes {takes} now: ours takes {SIGNATURES[name]}"


def test_options_of_strategies():
    strategy = pl.strategies.DDPStrategy(bucket_cap_mb=3, process_group_backend="gloo")
    words = "DDPStrategy does not keep DDP's keywords in _ddp_kwargs: gradients get no group and bucket of their own"
    assert ours.ddp_options(strategy) == {"bucket_cap_mb": 3}, words
    assert ours.process_group_backend(strategy) == "gloo", "_get_process_group_backend gives no backend any more"
    parallel = pl.strategies.ModelParallelStrategy
    words = "_save_distributed_checkpoint has changed: ShardedCheckpoint does not refuse strategies with one file"
    assert ours.writes_one_file(parallel(save_distributed_checkpoint=False)), words
    assert not ours.writes_one_file(parallel()) and not ours.writes_one_file(strategy), words


def test_batches_of_an_epoch():
    words = "Lightning reads the batches of an epoch elsewhere: packed epochs of unlike lengths would be cut or run on"
    loader = DataLoader(range(5))
    fetcher = SimpleNamespace(length=5)
    combined = SimpleNamespace(flattened=[loader], limits=[5])
    loop = SimpleNamespace(max_batches=5, _combined_loader=combined, _data_fetcher=fetcher)
    fake = SimpleNamespace(fit_loop=loop, limit_train_batches=1.0, val_check_interval=0.5, val_check_batch=2)
    ours.set_epoch_batches(fake, loader, 8)
    assert (loop.max_batches, combined.limits, fetcher.length, fake.val_check_batch) == (8, [8], 8, 4)
    fake.limit_train_batches = 3
    ours.set_epoch_batches(fake, loader, 8)
    assert loop.max_batches == 3
    real = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).fit_loop
    for name in ("max_batches", "_combined_loader", "_data_fetcher"):
        assert hasattr(real, name), words
    assert "val_check_batch" in inspect.getsource(type(real).setup_data), words


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
    assert module.device.type == "meta", "_update_properties does not set LightningModule.device: it is wrong"
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
    assert metric.update_count == 0 and metric._computed is None, "torchmetrics counts updates not in _update_count"


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
    assert "weights_only" in parameters(connector.dump_checkpoint), "dump_checkpoint(weights_only=) is not taken"
    first = parameters(connector.resume_start)[0]
    assert first == "checkpoint_path", f"resume_start takes {first} first: resuming would pass it a path"


def test_order_of_training_samples(trainer):
    """`_data_connector._resolve_sampler` accepts our arguments and is replaced only once."""
    connector, calls = trainer._data_connector, []
    has(connector, "_resolve_sampler", "training data of a loader with shuffle=False are shuffled")
    names = parameters(connector._resolve_sampler)
    assert names == ["dataloader", "shuffle", "mode"], f"_resolve_sampler takes {names}: samplers would not be chosen"
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


def test_checkpoints_between_micro_batches(trainer):
    """A checkpoint there would lack gradients. The callback can be copied and pickled; its hook is replaced once."""
    saver, calls = pl.callbacks.ModelCheckpoint(), []
    trainer.callbacks, trainer.fit_loop._combined_loader = [saver], SimpleNamespace()
    trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.max_batches = 2, 10
    saver.on_train_batch_end = partial(_noted, calls)
    ours.checkpoint_after_optimizer_steps(trainer)
    assert saver.on_train_batch_end.func is _noted, "a hook of the user's own was replaced"
    del saver.on_train_batch_end
    for _ in range(2):
        ours.checkpoint_after_optimizer_steps(trainer)
    hook = saver.on_train_batch_end
    assert hook.func is ours._unless_accumulating and hook.args[0].__func__ is type(saver).on_train_batch_end
    pickle.loads(pickle.dumps(copy.deepcopy(saver)))
    with mock.patch.object(saver, "on_train_batch_end", partial(hook.func, partial(_noted, calls))) as waits:
        for ready in (1, 2, 3):
            trainer.fit_loop.epoch_loop.batch_progress.current.ready = ready
            waits(trainer, ready)
    assert calls == [2]


def test_checkpoints_by_time():
    saver = pl.callbacks.ModelCheckpoint(train_time_interval=timedelta(minutes=1))
    has(saver, "_train_time_interval", "regions wait for rank 0 after each batch")
    assert ours.saves_by_time(saver) and not ours.saves_by_time(pl.callbacks.ModelCheckpoint(every_n_train_steps=1))


def _noted(calls, trainer, batch):
    calls.append(batch)


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
            arguments = parameters(getattr(owners[owner], name))
            assert arguments == taken, f"{owner}.{name} takes {arguments}: what replaces it takes {taken}"
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
    assert flat.ndim == 1 and dist.get_world_size(flat.get_group()) == 1, "DeviceMesh._flatten gives no group of all"
    store = torchs.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value", "_get_default_store gives no store: ranks cannot leave why they ended"
    backend = torchs.gloo_backend(dist.group.WORLD, "a name", timedelta(seconds=9))
    assert backend.size() == 1, "ProcessGroupGloo is made otherwise: control messages have no channel of their own"


def test_settings_of_the_compiler():
    usual = torchs.uses_autograd_cache()
    with torchs.use_autograd_cache(not usual):
        assert torchs.uses_autograd_cache() is not usual, "enable_autograd_cache is not in torch._functorch.config"
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
    assert kinds == {torch.float64}, "nn.Module._apply misses parameters or buffers: unsharded_to_device leaves some"


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
    assert formats is metadata._MEM_FORMAT_ENCODING and formats(0) in formats, "_MEM_FORMAT_ENCODING is no enum"
    function, arguments = copyreg.dispatch_table[torch.layout](torch.strided)
    name = f"{function.__module__}.{function.__qualname__}"
    words = f"layouts are pickled by {name}{arguments} now: the reader refuses `.metadata` that names it"
    assert (name, arguments) == ("torch.serialization._get_layout", ("torch.strided",)), words
    assert torchs.stored_layout(*arguments) is torch.strided


def test_setting_a_nested_value():
    state = {"a": {"b": 1}}
    torchs.set_nested(state, ("a", "b"), 2)
    assert state == {"a": {"b": 2}}, "_nested_dict.set_element sets nothing: values that are no tensors are not loaded"


# -- torch: models and training in less memory
def test_calls_of_a_module():
    module, x = nn.Linear(1, 1), torch.ones(1, 1)
    assert ext_torch.compiled_call(module) is None
    torchs.set_compiled_call(module, lambda x: "compiled")
    words = "a module's call does not read _compiled_call_impl: blocks are not compiled, and the profiler follows none"
    assert module(x) == "compiled" and ext_torch.compiled_call(module)(x) == "compiled", words
    assert isinstance(torchs.uncompiled(module)(x), torch.Tensor), "_call_impl is not the uncompiled call"
    torchs.set_compiled_call(module, None)
    assert isinstance(module(x), torch.Tensor), words


def test_limits_of_the_compiler():
    config = torch._dynamo.config
    with config.patch(recompile_limit=8):
        torchs.allow_recompiles(20)
        torchs.allow_recompiles(10)
        assert config.recompile_limit == 20, "recompile_limit is not a setting: patterns beyond the 8th run uncompiled"
    run = torchs.without_runtime_asserts(lambda: config.do_not_emit_runtime_asserts)
    words = "do_not_emit_runtime_asserts has no effect: backwards with rows of other ranks do not compile before 2.13"
    assert torch.__version__ >= "2.13" or run() is True, words


def test_backwards():
    values, calls = [], []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: values.append((torchs.in_backward(), torchs.backward_is_retained())))
    for retained in (True, False):
        y.sum().backward(retain_graph=retained)
    words = "torch's task of a backward does not tell whether it runs or its graph is kept: recomputation fails"
    assert values == [(True, True), (True, False)] and not torchs.in_backward(), words
    x.register_hook(calls.append)
    with torchs.hooks_paused([x]):
        (x * 1).sum().backward()
    assert not calls, "hooks of leaves run though _backward_hooks is None: DDP reduces a gradient for each chunk"
    (x * 1).sum().backward()
    assert len(calls) == 1, "hooks of leaves stay off after a chunk"


def test_what_selective_checkpointing_saves():
    forward, backward = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    with forward:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert torchs.saved_by_op(backward), "the second context has no storage of what was saved: offload finds nothing"


def test_modules_and_tensors_without_names():
    """A shared module or tensor is listed once; None is skipped."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)]))
    module[1].append(module[0])
    module[1][0].weight = module[0].weight
    module.register_module("none", None)
    module.register_buffer("again", module[1][1].running_mean)
    modules = ext_torch.modules_of(module)
    words = "CUDA graphs would be replayed for a changed module"
    assert len(modules) == len(set(modules)) == 5 and set(modules) == set(module.modules()), words
    for got, want in zip(ext_torch.tensors_of(modules), (module.parameters(), module.buffers()), strict=True):
        got, want = [id(x) for x in got], [id(x) for x in want]
        assert len(got) == len(set(got)) and set(got) == set(want), words


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_a_module(kind):
    module = nn.Linear(1, 1)
    assert not torchs.has_hooks(module)
    getattr(module, f"register_{kind}_hook")(lambda *x: None)
    words = f"{kind} hooks of a module are in another dict: they are skipped where the module is not called"
    assert torchs.has_hooks(module) and torchs.has_backward_hooks(module) is ("backward" in kind), words


def test_uncompiled_call():
    class Counted(torch.nn.Module):
        def forward(self, x):
            calls.append("compiled" if torch.compiler.is_compiling() else "plain")
            return x

    calls, module = [], Counted()
    module.compile(backend="eager")
    module.register_forward_pre_hook(lambda *x: calls.append("hook"))
    torchs.uncompiled(module)(torch.ones(1))
    assert calls == ["hook", "plain"], "Module._call_impl runs no hooks, or compiled code: sharded decoding fails"


def test_version_of_a_tensor():
    x = torch.ones(1)
    before = ext_torch.version_of(x)
    assert ext_torch.version_of(x.add_(1)) > before, (
        "_version does not count writes: a mask that changed is taken for the same"
    )


# -- torch: dense attention
ATTENTIONS = {
    torchs.CUDNN_ATTENTION: (torchs.cudnn_attention_forward, torchs.cudnn_attention_backward),
    torchs.FLASH_ATTENTION: (torchs.flash_attention_forward, torchs.flash_attention_backward),
    torchs.CPU_FLASH_ATTENTION: (torchs.cpu_flash_attention_forward, torchs.cpu_flash_attention_backward),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_dense_attention(name):
    """Check shapes on the meta device. tests/attention compares numbers on a CPU and on a GPU."""
    assert torchs.missing_op(name) is None, f"no aten::{name}: its engine serves nothing"
    assert "no aten::_no_op" in torchs.missing_op("_no_op")
    (forward, backward), x = ATTENTIONS[name], torch.empty(2, 3, 16, 8, dtype=torch.bfloat16, device="meta")
    words = f"aten::{name} takes or returns something else: its engine has no log-sum-exp or no gradients"
    out, lse = forward(x, x, x, True, 0.5)
    assert (out.shape, lse.shape, lse.dtype) == (x.shape, x.shape[:3], torch.float32), words
    assert [g.shape for g in backward(x, x, x, x, out, lse, True, 0.5)] == [x.shape] * 3, words


# -- torch: planning and the memory profiler
def test_bare_copies():
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    bare = torchs.bare_copy(module)
    words = "a module keeps parameters, hooks or children elsewhere: copies share them with the model"
    assert [type(m) for m in bare] == [nn.ReLU] and not list(bare.parameters()) and len(module) == 2, words
    bare.register_forward_hook(lambda *x: None)
    assert torchs.has_hooks(bare) and not torchs.has_hooks(module), words


def test_replaced_functions():
    before = torch.rms_norm
    with ext_torch.replaced(torch, "rms_norm", "another"):
        assert torch.rms_norm == "another"
    assert torch.rms_norm is before
    with pytest.raises(AttributeError), ext_torch.replaced(torch, "renamed_norm", "another"):
        pass


def test_transforms():
    assert not torchs.transformed()
    values = []
    torch.func.grad(lambda x: values.append(torchs.transformed()) or x)(torch.ones(()))
    assert values == [True], "torch.func is not noticed: forward-mode derivatives of our ops are silently zero"


def test_modes():
    words = "the stack of {} modes is asked otherwise: memory is counted where it cannot be, or operators twice"
    assert not ext_torch.function_modes() and not ext_torch.in_dispatch_mode() and not ext_torch.is_traced()
    with ext_torch.fake_tensors():
        assert ext_torch.in_dispatch_mode(), words.format("dispatch")
        assert torchs.is_fake(torch.ones(1)), "FakeTensorMode makes real tensors: a plan fills this machine's memory"
        with torchs.real_tensors():
            assert torch.ones(1).item() == 1, "no values under _disable_current_modes: no positions of patches"
    with torch.device("cpu"):
        assert ext_torch.function_modes() == 1, words.format("function")
    values = []
    make_fx(lambda x: values.append(ext_torch.is_traced()) or x + 1)(torch.ones(1))
    assert values == [True], words.format("tracing")


def test_operators_of_a_device():
    class Names(ext_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    @torch.library.custom_op("compat_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    names, x = [], torch.ones(2)
    with Names():
        ext_torch.run_on_device(torch.ops.compat_test.twice.default, "cpu", (x,), {})
    assert names == ["aten::mul.Tensor"], "an operator is not run by its device's key: what it allocates is not counted"


def test_copies_of_many():
    to = [torch.zeros(2), torch.zeros(3, 1)]
    ext_torch.copy_all(to, [torch.ones(2), torch.ones(3, 1)])
    assert all(bool((x == 1).all()) for x in to), "_foreach_copy_ copies otherwise: gradients of CUDA graphs are wrong"


def test_operators_below_autograd():
    x = torch.ones(2, requires_grad=True)
    words = "_AutoDispatchBelowAutograd leaves autograd on: the op calls itself for ever"
    assert torchs.below_autograd(torch.ops.aten.mul.Tensor, x, x).grad_fn is None, words


def test_operators_by_their_schemas():
    ops, words = torch.ops.aten, "OpOverload._schema says otherwise {}: planned memory is wrong"
    assert ext_torch.changes_inputs(ops.add_.Tensor) and not ext_torch.changes_inputs(ops.add.Tensor), words.format(
        "writes"
    )
    views = [ext_torch.returns_view(op) for op in (ops.view.default, ops._unsafe_view.default, ops.add.Tensor)]
    assert views == [True, True, False], words.format("is a view")
    x = torch.ones(2, 4, device="meta")
    assert ext_torch.fused_rms_norm(x, [4], x[0], None).shape == x.shape, "aten::_fused_rms_norm takes something else"
    with FakeTensorMode(), pytest.raises(DataDependentOutputException) as error:
        torch.ones(1).item()
    assert ext_torch.reads_number(error.value.func), "`.item()` is another operator: fake tensors have no 1 to read"


def test_memory_of_tensors():
    x, y = torch.ones(4), torch.ones(4)
    keys = [ext_torch.storage_key(t.untyped_storage()) for t in (x, x[2:], y)]
    assert keys[0] == keys[1] != keys[2], "_cdata does not tell storages apart: memory is counted twice or not at all"
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    indices, values = ext_torch.sparse_parts(sparse)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1.0, 2.0]), "sparse tensors have other parts"


def test_graphs_ahead_of_time():
    module, graphs = nn.Linear(2, 2), []
    x = torch.ones(3, 2)

    def run(weight, bias, x):
        with ext_torch.with_parameters(module, {"weight": weight, "bias": bias}):
            return module(x).exp()

    compiler = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    compiled = ext_torch.ahead_of_time(run, compiler, ext_torch.min_cut, 2)
    words = "AOTAutograd, its partitioner or `stateless` changed: compiled blocks are not planned"
    weights = [p.detach().clone().requires_grad_() for p in module.parameters()]
    out = compiled(*weights, x)
    torch.testing.assert_close(out, module(x).exp(), msg=words)
    out.sum().backward()
    assert len(graphs) == 2 and weights[0].grad is not None and module.weight.grad is None, words


def test_history_of_memory():
    memory = torch.cuda.memory
    for name in ("_record_memory_history", "_dump_snapshot"):
        has(memory, name, "the profiler writes no snapshots")
    taken = parameters(memory._record_memory_history)
    assert {"enabled", "max_entries"} <= {*taken}, f"_record_memory_history takes {taken}: record_memory cannot call it"
    assert parameters(memory._dump_snapshot)[0] == "filename", "_dump_snapshot takes no path first: dump_memory cannot"
    has(torch.cuda, "_sleep", "occupy_gpu keeps no GPU busy, and kernels are timed with their launches")


@pytest.mark.gpu
def test_workspaces_of_graphs():
    has(torch._C, "_cuda_clearCublasWorkspaces", "CUDA graphs write to memory that is freed: see `recording`")


def test_graphs_and_traced_tensors():
    x = torch.ones(2)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    says = "torch's classes of {} moved: see _compat/torch.py"
    assert torchs.is_fake(fake) and not torchs.is_fake(x), says.format("fake tensors")
    op = torch.ops.aten.add.Tensor
    assert ext_torch.is_op(op) and not ext_torch.is_op(torch.add), says.format("ops")
    tree = {"a": [1, (2,)]}
    assert ext_torch.map_tree(lambda y: y + 1, tree) == {"a": [2, (3,)]}, says.format("trees")
    assert ext_torch.map_tree(type, tree, tuple) == {"a": [int, tuple]}, says.format("trees")
    flat, spec = ext_torch.flatten(tree)
    assert flat == ext_torch.leaves(tree) == [1, 2] and ext_torch.unflatten(flat, spec) == tree, says.format("trees")


# -- files, ranks and processes ----------------------------------------------------------------------------------------
class Takes(pl.LightningModule):
    """A module with an int and a list as arguments."""

    def __init__(self, size: int = 2, rows: list[int] | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(size, size)


def test_types_of_arguments():
    types = ours.argument_types(Takes)
    assert types["size"] == [int] and types["rows"] == [list[int] | None], (
        "argument_types reads no annotations from jsonargparse: values of a checkpoint are not checked"
    )


def test_values_of_a_recipe():
    assert ours.given_hyperparameters() == {}
    with _given_hyperparameters_context({"size": 3}, "x"):
        values = ours.given_hyperparameters()
    assert values == {"size": 3, "_instantiator": "x"}, "given_hyperparameters misses what LightningCLI offers to save"


def test_modules_of_checkpoints():
    module = Takes(3)
    stored = {
        "state_dict": module.state_dict(),
        "hyper_parameters": {"size": 3, "rows": None},
        "hparams_type": "<class 'collections.OrderedDict'>",
    }
    instance = ours.module_from_checkpoint(Takes, stored, True, {"rows": [1]})
    assert torch.equal(instance.layer.weight, module.layer.weight), "_load_state loads no weights"
    assert instance.hparams.rows == [1] and ours.LOADED.get() is None


def test_checkpoints_of_older_lightning():
    older = {"pytorch-lightning_version": "1.5.0", "state_dict": {}, "global_step": 3, "epoch": 1}
    assert "loops" in ours.migrated(copy.deepcopy(older), "a.ckpt"), "_pl_migrate_checkpoint changes nothing"


def test_reading_of_checkpoints(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "a.ckpt")
    for stored in (
        ours.read_trusted(tmp_path / "a.ckpt", "cpu"),
        ours.read_remote(f"file://{tmp_path}/a.ckpt"),
        torch.load(tmp_path / "a.ckpt", map_location=ours.map_to_known_devices, weights_only=True),
    ):
        assert torch.equal(stored["x"], torch.ones(2))


def test_groups_and_their_calls(tmp_path):
    had = torchs.process_groups()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        (group,) = [x for x in torchs.process_groups() if x not in had]
        begun = torchs.collectives_begun(group)
        dist.barrier(group)
        words = "groups do not count their calls: what a run leaves open is not seen"
        assert group is dist.group.WORLD and torchs.collectives_begun(group) > begun, words
    finally:
        dist.destroy_process_group()
    assert torchs.process_groups() == had


DEEP = """
import os, threading, torch
from lightning_dilated._compat.torch import ThreadStack
stack, seen = ThreadStack("values"), []

class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            with stack.with_top("inside"):
                pass
            seen.append((threading.get_ident() != main, stack.values, stack.of_backward()))
        else:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
        return grad, None

main = threading.get_ident()
with stack.with_top("a"), stack.with_top("b"):
    Deep.apply(torch.ones(1, requires_grad=True), 70).backward()
Deep.apply(torch.ones(1, requires_grad=True), 70).backward()
print(seen, flush=True)
os._exit(0)  # threads of autograd still run
"""


def test_stacks_of_threads():
    """A thread of autograd (used for GPUs, and here for a deep backward) sees the values of the calling thread."""
    stack, values = torchs.ThreadStack("values"), []
    with stack.with_top("a"):
        thread = threading.Thread(target=lambda: values.append(stack.of_backward()))
        thread.start()
        thread.join()
    assert values == [()] and stack.of_backward() == ()
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[(True, (), ('a', 'b')), (True, (), ())]", done.stderr
    for name in ("_stash_obj_in_tls", "_is_key_in_tls", "_get_obj_in_tls"):
        has(torch._C, name, "the backward of a GPU does not find the sequence of its caller")


def test_launchers_end_runs():
    assert parameters(launchers._SubprocessScriptLauncher.launch)[:2] == ["self", "function"]
    strategy = pl.strategies.DDPStrategy()
    strategy.cluster_environment, strategy._launcher, ended = LightningEnvironment(), None, []
    strategy.end_run = lambda: ended.append(1)
    ours.end_runs(strategy)
    assert strategy._launcher.launch(lambda x: x + 1, 2, trainer=SimpleNamespace(strategy=strategy)) == 3 and ended == [
        1
    ]


def test_runs_that_are_over(trainer):
    assert not ours.is_over(trainer), "a Trainer that has not run has another status than before"
    fake = SimpleNamespace(state=SimpleNamespace(status=type(trainer.state.status).INTERRUPTED))
    assert ours.is_over(fake)


def test_loaders_of_an_evaluation(trainer):
    for name in ("_is_sequential", "num_dataloaders"):
        has(type(trainer.validate_loop), name, "batches of several loaders are not told apart")
    has(trainer.validate_loop, "_combined_loader", "batches of several loaders are not told apart")
    loop = SimpleNamespace(
        _combined_loader=SimpleNamespace(iterables={"a": 1}), _is_sequential=False, num_dataloaders=2
    )
    fake = SimpleNamespace(training=False, predicting=False, state=SimpleNamespace(stage="test"), _evaluation_loop=loop)
    assert ours.combined_loaders(fake) == {"a": 1} and ours.evaluated_loaders(fake) == 1
    loop._is_sequential = True
    assert ours.combined_loaders(fake) is None and ours.evaluated_loaders(fake) == 2
    has(pl.Trainer, "_evaluation_loop", "the loaders of an evaluation are not found")


def test_batches_of_a_sampler_of_batches(trainer):
    connector = trainer._data_connector
    names = parameters(connector._prepare_dataloader)
    assert names == ["dataloader", "shuffle", "mode"], f"_prepare_dataloader takes {names} now"


def test_parameters_of_each_rank():
    module = nn.Linear(2, 2)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert torchs.own_parameters(module) == {"bias"}, "DDP keeps the names of own parameters elsewhere"


def test_modes_see_ranges():
    values = []

    class Mode(ext_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            values.append((func, args[0]))
            return func(*args, **(kwargs or {}))

    with ext_torch.fake_tensors(), Mode(), torch.profiler.record_function("tiles"):
        pass
    words = "record_function calls other operators: plan does not see loops over tiles"
    assert tuple(func for func, _ in values) == ext_torch.RANGE and values[0][1] == "tiles", words
    values.clear()
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with torch.autocast("cpu", torch.bfloat16), Mode():
        weight @ weight
    words = "autocast casts by another operator: plan does not see copies of weights"
    assert any(func is ext_torch.CAST and args is weight for func, args in values), words


def test_templates_of_chats():
    pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    from lightning_dilated.ext._compat.transformers import templates_compiled_in

    class Loud(ImmutableSandboxedEnvironment):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.filters["upper"] = lambda x: f"{x}!"

    with templates_compiled_in(Loud):
        words = "transformers compiles templates elsewhere: a template of a file has no bounds"
        assert chat_template_utils._compile_jinja_template("{{ 'a' | upper }}").render() == "a!", words
    assert chat_template_utils._compile_jinja_template("{{ 'a' | upper }}").render() == "A"
