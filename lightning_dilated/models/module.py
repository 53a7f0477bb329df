"""DilatedModule, the base class of this package's models and of users' models.

A subclass defines two methods: `build()` makes the layers, and `loss_terms(batch)` returns the sum of the token losses
and the number of tokens. The base class adds the exact mean over tokens, metrics, optimizer and scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dilated._compat import lightning as compat
from lightning_dilated._compat.torch import bare_copy, real_tensors
from lightning_dilated._extensions import hook
from lightning_dilated._validation import check_input
from lightning_dilated.data.module import rebuilt
from lightning_dilated.models.learning_rate import LR_SCALE, LearningRate, WarmupCosine, fast_parameters
from lightning_dilated.models.metrics import DeferredScalar, LoaderStates, TokenMean, batches_in, each_batch
from lightning_dilated.models.pretrained import Pretrained, class_in_file, class_path, file_arguments, make_values
from lightning_dilated.models.stored import plain_value, read_hparams, read_model, stored_hparams
from lightning_dilated.models.transformer import DilatedTransformer, layer_bases, longest, position_advice, stored_bases
from lightning_dilated.pattern import DilatedPattern, Hashed
from lightning_dilated.pattern.layers import read_patterns
from lightning_dilated.pattern.rows import cycle_to
from lightning_dilated.recurrence.description import layer_recurrences, plain_recurrences, without_starts
from lightning_dilated.sequence import Place, SequenceSpec, loss_share, loss_sum
from lightning_dilated.sequence.collectives import scalar

if TYPE_CHECKING:
    from lightning_dilated.pattern import Explanation


STAGES = ("train", "val", "test")


class DilatedModule(Pretrained, LearningRate):
    """The base class of the LightningModules.

    Args:
        optimizer: a function that makes the optimizer from parameter groups; in YAML a `class_path` with `init_args`.
            `configure_optimizers` calls it, when the parameters are final. `model.lr` is the optimizer's learning rate.
        lr_scheduler: a function that makes a scheduler, stepped every batch, from the optimizer; None: a constant rate.

    A subclass sets `sequence_spec`, which names the batch entries that are sequences, for strategies that shard them.

    Logged: `train_loss`, the mean over the tokens of a micro-batch (accumulation averages micro-batches, as Lightning
    does; on a GPU the progress bar is a step or two late, see `DeferredScalar`); `val_loss` and `test_loss`, the exact mean
    over all tokens of the epoch; and the `derived_metrics` of each. The Trainer makes the layers through `configure_model`;
    without a Trainer they are made when weights are first accessed. `save_pretrained`, `from_pretrained` and `push_to_hub`
    come from `Pretrained`.

    Raises:
        TypeError: if `optimizer` or `lr_scheduler` is not callable.
    """

    sequence_spec: SequenceSpec | None = None
    #: entries of a batch that stay on the CPU, so that the host can read their values without waiting for a GPU
    host_entries: tuple[str, ...] = ("lengths", "cu_seqlens")
    #: attributes that config.json stores in addition to hyperparameters; their values are strings or lists of strings
    also_in_config: tuple[str, ...] = ()
    #: whether the model predicts the batch's `label`
    predicts_label = False
    predicts_next_token = False  # whether the model predicts the next token
    #: whether `predict_step` returns rows for PredictionWriter
    predicts_rows = False
    #: whether the command line takes `max_seq_len` from the data if a recipe does not set it
    length_from_data = False
    #: whether `layout="auto"` may choose zigzag: the model must take positions from the group of ranks, and mix tokens
    #: only by this package's layers; a subclass that redefines layers, forward, losses or steps must set it again
    takes_any_layout = False
    #: whether the model's published weights determine its pattern
    released_pattern = False
    depth: int
    num_heads: int
    num_kv_heads: int | None

    def __init__(
        self, optimizer: OptimizerCallable = torch.optim.AdamW, lr_scheduler: LRSchedulerCallable | None = None
    ) -> None:
        super().__init__()
        for name, value in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function of parameters, such as torch.optim.AdamW; got {value!r}.")
        self._make_optimizer, self._make_scheduler = optimizer, lr_scheduler
        self._built = False
        self._shown = DeferredScalar()
        self._suffix = ""  # appended to the names of logged metrics
        self._loader_states = {stage: LoaderStates() for stage in STAGES}
        self._patterns: tuple[DilatedPattern, ...] = ()
        self._explained: int | None = 0  # length of the longest checked sequence; None after advice was given
        self._warned_of_length = False
        means = nn.ModuleDict({stage: TokenMean() for stage in STAGES[1:]})
        self.mean_loss: Mapping[str, TokenMean] = means  # type: ignore[assignment]  # torch declares plain modules

    # -- what a subclass defines -------------------------------------------------------------------------------------
    @compat.restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model as Lightning does, but read the file's hyperparameters as plain values, without a parser.

        The file may name this class or an imported subclass. The file's optimizer and scheduler are ignored.

        Args:
            map_location, strict: as in Lightning.
            hparams_file: a csv or YAML of hyperparameters that replace the checkpoint's, under the same rules.
            weights_only: pass False only if you trust the pickle in the file.
            kwargs: arguments of the class that replace the file's arguments.

        Raises:
            ValueError: if the file names another class; the error names the file and the class.
        """
        check_input(checkpoint_path)
        stored = read_model(checkpoint_path, map_location, weights_only)
        where = checkpoint_path if hparams_file is None else hparams_file
        hparams = stored_hparams(stored) if hparams_file is None else read_hparams(Path(hparams_file))
        which = class_in_file(cls, hparams.get("_class_path") or cls.__name__, where, "load_from_checkpoint")
        arguments = {k: make_values(v) for k, v in file_arguments(hparams, where, kwargs).items()}
        return compat.module_from_checkpoint(which, {**stored, "hyper_parameters": arguments}, strict, kwargs)

    def build(self) -> None:
        """Make the layers; called once, under the strategy's device and dtype."""
        raise TypeError(f"{type(self).__name__} must define build(), which makes its layers.")

    def loss_terms(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return (sum of the losses of the batch's tokens, number of these tokens), both scalars."""
        raise TypeError(f"{type(self).__name__} must define loss_terms(batch), which returns (sum of losses, tokens).")

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Return {name: value} of further metrics, computed from a mean loss (a scalar), to log with the loss.

        They are not logged if a subclass redefines the loss but not this method, as its loss may mean something else.
        """
        return {}

    def _derived(self, loss: Tensor) -> dict[str, Tensor]:
        """Return `derived_metrics`, or {} if the class that defines them has a subclass that redefines the loss."""
        names = {"derived_metrics", "loss_terms", "token_losses", "token_mean"}
        latest = next(x for owner in (self, *type(self).__mro__) if (x := names & vars(owner).keys()))
        return self.derived_metrics(loss) if "derived_metrics" in latest else {}

    @property
    def patterns(self) -> tuple[DilatedPattern, ...]:
        """The pattern of each layer. If a subclass sets only `pattern` and `depth`, every layer has `pattern`."""
        pattern, depth = getattr(self, "pattern", None), getattr(self, "depth", None)
        if not self._patterns and isinstance(pattern, DilatedPattern) and isinstance(depth, int):
            return (pattern,) * depth
        return self._patterns

    def explain(self, seq_len: int) -> Explanation:
        """Return a printable explanation of the tokens that the layers' patterns reach in a sequence of N tokens."""
        return hook("explain a model")(self, seq_len)

    # -- for export ----------------------------------------------------------------------------------------------------
    #: rows that the model adds to its input, such as a class token
    export_rows = 0

    def export_inputs(self, length: int, batch_size: int) -> dict[str, Tensor]:
        """Return random inputs {name: (batch_size, length, ...)} for the exported model, on the model's device."""
        raise TypeError(f"{type(self).__name__} must define export_inputs(length, batch_size) to be exported.")

    def export_outputs(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs {name: tensor} of the exported model for inputs (batch_size, length, ...)."""
        raise TypeError(f"{type(self).__name__} must define export_outputs(**inputs) to be exported.")

    # -- for planning: a subclass with `example_batch` can be planned ----------------------------------------------------
    #: a description of what a token is, if it is not a token of text
    token_meaning: str | None = None

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """Return a batch of one sequence of N random tokens on the CPU, with all entries that training needs.

        `plan` calls this in a mode where tensors have no values, so use `host_tensor` to make tensors for the host.
        `build` must make `self.transformer`, a `DilatedTransformer` of `self.depth` blocks with `self.patterns`, and
        may compile it only if `self.compile_blocks` is true.
        """
        raise TypeError(
            f"{type(self).__name__} must define example_batch(tokens), which returns a batch of one sequence of random "
            "tokens, to be planned."
        )

    @staticmethod
    def host_tensor(values: Any) -> Tensor:
        """Return a CPU tensor of `values`; under `plan` it is a real tensor, not a fake one."""
        with real_tensors():
            return torch.tensor(values)

    def planning_copy(self, depth: int) -> Self:
        """Return an unbuilt copy with a different number of blocks, without pretrained weights and compilation.

        Redefine this method if the loss reads the values of tensors, which tensors do not have while `plan` runs.
        """
        copy: Any = bare_copy(self)
        copy._built, copy._patterns = False, cycle_to(self.patterns, depth) if self.patterns else ()
        changed = {"depth": depth, "pretrained": None, "compile_blocks": False, "linear_dtype": None}
        for name in ("rotary_bases", "recurrences", "hashed"):
            if layers := getattr(self, name, None):
                setattr(copy, name, cycle_to(layers, depth))
        copy.__dict__.update({name: value for name, value in changed.items() if hasattr(self, name)})
        return copy

    def token_features(self) -> tuple[int, ...]:
        """Return, for each stack, how many features of a token the linear layers outside of the blocks read or write.

        By default the model has one stack, and these layers are the model's direct children. The model must be built.
        """
        transformer: Any = self.transformer
        width = transformer.blocks[0].ffn.fc1.in_features
        numbers = sum(layer.weight.numel() for layer in self.children() if isinstance(layer, nn.Linear))
        return (max(1, numbers // width),)

    def reads_logits(self) -> bool:
        """Return True if the first number in `token_features` counts logits; the model must be built."""
        return isinstance(getattr(self, "head", None), nn.Linear)  # `step_flops` uses the same test

    def planning_notes(self) -> list[str]:
        """Return the assumptions of a plan of this model, as sentences for its reader."""
        return []

    # -- called by Lightning -------------------------------------------------------------------------------------------
    def configure_model(self) -> None:
        """Build the layers on the first call: Lightning calls this at every fit, validate, test and predict."""
        compat.load_to_cpu_by_name(getattr(compat.attached_trainer(self), "strategy", None), check_input)
        if not self._built:
            checkpoint, strict = compat.LOADED.get() or ({}, None)
            # skip if another package's on_load_checkpoint may replace the tensors: Lightning calls it after the build
            replaced = not _is_ours(type(self).on_load_checkpoint)
            if isinstance(state := checkpoint.get("state_dict"), Mapping) and not replaced:
                self.load_without_values(state, whole=strict is not False)
            self._built = True
            self.build()
            self.train(self.training)  # .eval() may have been called before the layers existed

    def _built_outside(self) -> DilatedModule:
        """Build the layers unless a Trainer will build them, and return self."""
        if not self._built and compat.attached_trainer(self) is None:
            self.configure_model()
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nn.Module's parameters; without a Trainer build the layers first, as the next methods do."""
        return super(DilatedModule, self._built_outside()).named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        return super(DilatedModule, self._built_outside()).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super(DilatedModule, self._built_outside()).load_state_dict(*args, **kwargs)

    def load_without_values(self, state_dict: Mapping[str, Any], whole: bool = True) -> Self | None:
        """Compare a state dict with layers on the meta device, as a file may declare sizes that do not fit in memory.

        Args:
            whole: whether the state dict must contain all tensors.

        Returns:
            The model on the meta device; None if another package's `build` needs values.

        Raises:
            ValueError: for more layers than tensors, unless `build` is another package's, which may share tensors.
            RuntimeError: for tensors of a wrong size, as in nn.Module's `load_state_dict`.
        """
        depth, builds_here = getattr(self, "depth", 0), _is_ours(type(self).build)
        if builds_here and whole and isinstance(depth, int) and depth > len(state_dict):
            raise ValueError(
                f"the hyperparameters declare depth={depth:,}, but there are {len(state_dict):,} tensors: these belong "
                "to another model, or the file is incomplete."
            )
        blank: Any = self.planning_copy(depth)
        blank._built = True
        with torch.device("meta"), warnings.catch_warnings():
            try:
                blank.build()
            except (RuntimeError, TypeError):  # `build` reads values, which meta tensors do not have
                if builds_here:
                    raise
                return None
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            nn.Module.load_state_dict(blank, state_dict, strict=False)
        return blank

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Build the layers before .to(), .double() and similar methods of nn.Module."""
        return super(DilatedModule, self._built_outside())._apply(*args, **kwargs)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch as Lightning does, but leave the `host_entries` of a mapping on their device."""
        if self._are_several(batch):
            return each_batch(
                batch, self._loaders(), lambda x: self.transfer_batch_to_device(x, device, dataloader_idx)
            )
        if not (isinstance(batch, Mapping) and batch.keys() & set(self.host_entries)):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        movable = {name: x for name, x in batch.items() if name not in self.host_entries}
        moved = super().transfer_batch_to_device(movable, device, dataloader_idx)
        return rebuilt(batch, {name: moved.get(name, x) for name, x in batch.items()})

    def _loaders(self) -> Any:
        """Return the loaders that CombinedLoader reads together in this stage; None if it reads one after another."""
        trainer = compat.attached_trainer(self)
        return None if trainer is None else compat.combined_loaders(trainer)

    def _are_several(self, batch: Any) -> bool:
        """Return True if a batch combines the batches of several loaders."""
        parts = batches_in(batch, self._loaders())
        return len(parts) != 1 or parts[0] is not batch

    def _shifted(self, batch: Any) -> Any:
        """Shift the entries that `sequence_spec.shift` names, unless a strategy has already shifted them."""
        done = hasattr(getattr(compat.attached_trainer(self), "strategy", None), "sequence")
        if done or not (self.sequence_spec and self.sequence_spec.shift):
            return batch
        return self.sequence_spec.cut(batch, Place())

    def _data_setting(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the Trainer's datamodule, or `default` if there is none."""
        return getattr(getattr(compat.attached_trainer(self), "datamodule", None), name, default)

    def _optimizer_step(self) -> int:
        """Return the Trainer's number of optimizer steps; 0 without a Trainer."""
        return getattr(compat.attached_trainer(self), "global_step", 0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the class name, and patterns as plain mappings, so that the file loads with `weights_only=True`."""
        checkpoint["class_path"] = class_path(self)
        hparams = checkpoint.get("hyper_parameters", {})
        if hparams:
            checkpoint["hyper_parameters"] = {k: plain_value(v) for k, v in hparams.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the layers attend as they did in training, because weights alone do not show a difference.

        Warn if the pattern differs.

        Raises:
            ValueError: in a Trainer's run, if rotary positions, recurrences or hashed heads differ.
        """
        hparams = checkpoint.get("hyper_parameters") or {}
        bases, stored_base = getattr(self, "rotary_bases", ()), hparams.get("rotary_base")
        if compat.attached_trainer(self) is None or not bases:  # without a Trainer the caller chose the bases
            return
        if any(bases) and isinstance(stored_base, (int, float, list, tuple)):
            trained = stored_bases(layer_bases(stored_base, hparams.get("max_seq_len"), len(bases)))
            options: Any = self.options
            dense = hparams.get("global_rotary") is not False, options.global_rotary
            for name, former, own in (("rotary_base", trained, stored_bases(bases)), ("global_rotary", *dense)):
                if former != own:
                    raise ValueError(
                        f"the checkpoint was trained with {name}={former}, and this model has {own}, which gives "
                        f"other results. Set {name} to the checkpoint's value."
                    )
        self._check_recurrences(hparams)
        self._check_hashed(hparams)
        stored = hparams.get("pattern")
        with contextlib.suppress(TypeError, ValueError):  # a subclass may store something else under this name
            pattern = stored and read_patterns(stored, len(bases), self.num_heads, self.num_kv_heads)
            if pattern and pattern != self.pattern:
                rank_zero_warn(f"the checkpoint was trained with {pattern}, and this model attends by {self.pattern}.")

    def _check_recurrences(self, hparams: Mapping[str, Any]) -> None:
        """Raise ValueError if the checkpoint's recurrences differ in more than the initial value `gate_init`."""
        current = getattr(self, "recurrences", None)
        if current is None or "recurrence" not in hparams:
            return
        try:
            stored = layer_recurrences(hparams["recurrence"], len(current), getattr(self, "causal", False))
        except (TypeError, ValueError):  # the checkpoint's model had a different depth, or was not causal
            stored = None
        if stored is None or without_starts(stored) != without_starts(current):
            raise ValueError(
                f"the checkpoint was trained with recurrence={hparams['recurrence']!r}, and this model has "
                f"{plain_recurrences(current)!r}, which gives other results. Set recurrence to the checkpoint's value."
            )

    def _check_hashed(self, hparams: Mapping[str, Any]) -> None:
        """Raise ValueError if the checkpoint's hashed heads are in other layers, or read other rows."""
        current, stored = getattr(self, "hashed", ()), hparams.get("hashed")
        if not current or "hashed" not in hparams:
            return
        former = [None] * len(current) if stored is None else Hashed.from_dict(stored).in_layers(len(current))
        if [x and x.read_rows for x in former] != [x and x.read_rows for x in current]:
            raise ValueError(
                f"the checkpoint was trained with hashed={stored!r}, and this model has other hashed heads, which give "
                "other results. Set hashed to the checkpoint's value; losses and soft_until may differ."
            )

    def token_mean(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the batch's tokens, and their number, both scalar; without tokens the loss is 0.

        If ranks share a sequence, return this rank's share of the mean over all ranks' tokens, and this rank's number
        of tokens. Batches that CombinedLoader combines count as one batch.
        """
        terms = [self._training_terms(part) for part in batches_in(batch, self._loaders())]
        total = functools.reduce(operator.add, (losses for losses, _ in terms))
        tokens = functools.reduce(operator.add, (scalar(count, total.device) for _, count in terms))
        return loss_share(total, tokens), tokens

    def _training_terms(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return the `loss_terms` of a batch in training."""
        return self.loss_terms(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss over the batch's tokens, or this rank's share of this mean if ranks share a sequence."""
        share, _ = self.token_mean(each_batch(batch, self._loaders(), self._shifted))
        loss = loss_sum(share)
        self.log("train_loss", loss, batch_size=1)
        if compat.attached_trainer(self) is not None:
            self._show(self._shown.of(loss))
        for name, value in self._derived(loss).items():
            self.log(f"train_{name}", value, batch_size=1)
        return share

    def _show(self, loss: float | None) -> None:
        if loss is not None:
            self.trainer.progress_bar_metrics["train_loss"] = loss

    def on_fit_start(self) -> None:
        """Switch to training mode: Lightning does not do this, and loaded encoders are in eval mode."""
        compat.checkpoint_after_optimizer_steps(self.trainer)
        self._shown = DeferredScalar()  # the last fit may have used a different device
        self.train()

    def on_train_end(self) -> None:
        """Show the last step's loss in the progress bar, and free the CUDA graphs of training steps."""
        self._show(self._shown.last())
        for module in self.modules():
            if isinstance(module, DilatedTransformer) and module.graphs is not None:
                module.graphs.free()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Warn once about limits of the pattern at the batch's length, and about sequences longer than `max_seq_len`."""
        made_for = None if self._warned_of_length else getattr(self, "max_seq_len", None)
        if self._explained is None and made_for is None:
            return
        seq_len = max(self._longest(part) for part in batches_in(batch, self._loaders()))
        if made_for is not None and seq_len > made_for:
            self._warned_of_length = True
            rank_zero_warn(
                f"{type(self).__name__} is made for max_seq_len={made_for:,}, but trains on a sequence of {seq_len:,} "
                f'tokens. Set the model\'s max_seq_len to {seq_len} or more (a rotary_base of "length" follows it), or '
                "shorten the data's sequences."
            )
        if self._explained is not None and seq_len > self._explained:
            advice = hook("advice about patterns")(self, seq_len), position_advice(self, seq_len)
            hints = [hint for hint in advice if hint]
            self._explained = None if hints else seq_len
            for hint in hints:
                rank_zero_warn(hint)

    def _longest(self, batch: Any) -> int:
        """Return N of the longest sequence or document of a training batch; 0 if unknown."""
        return longest(batch, self.sequence_spec, getattr(self.trainer.strategy, "sequence", None))

    def _evaluate(self, stage: str, batch: Any) -> None:
        self.mean_loss[stage].update(*self.loss_terms(self._shifted(batch)))

    def _report(self, stage: str) -> None:
        metric = self.mean_loss[stage]
        loss = metric.compute()  # torchmetrics sums over the ranks
        metric.reset()
        self._log_of_all(f"{stage}_loss", loss)
        for name, value in self._derived(loss).items():
            self._log_of_all(f"{stage}_{name}", value, prog_bar=stage == "val")

    def _log_of_all(self, name: str, value: Any, **options: Any) -> None:
        """Log a value that is already reduced over ranks, without Lightning's advice to set `sync_dist`."""
        name += self._suffix
        warnings.filterwarnings("ignore", message=re.escape(f"It is recommended to use `self.log({name!r}"))
        self.log(name, value, add_dataloader_idx=False, **options)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate_all("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate_all("test", batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._report_all("val")

    def on_test_epoch_end(self) -> None:
        self._report_all("test")

    def _evaluate_all(self, stage: str, batch: Any, loader: int) -> None:
        """Add a batch, or all batches in a combined batch, to the metrics of the loader with this index."""
        self._of_loader(stage, loader)
        for part in batches_in(batch, self._loaders()):
            self._evaluate(stage, part)

    def _report_all(self, stage: str) -> None:
        """Log the metrics of a stage; with several loaders, log each loader's metrics with Lightning's suffixes."""
        loaders = compat.evaluated_loaders(self.trainer) if compat.attached_trainer(self) is not None else 1
        for loader in range(loaders):
            self._of_loader(stage, loader)
            self._suffix = f"/dataloader_idx_{loader}" if loaders > 1 else ""
            self._report(stage)
        self._suffix = ""
        self._of_loader(stage, 0)

    def _of_loader(self, stage: str, loader: int) -> None:
        """Switch the metrics of a stage to a loader's state."""
        groups = [x for x in self.children() if isinstance(x, nn.ModuleDict) and stage in x]
        metrics = [metric for x in groups if isinstance(metric := x[stage], Metric)]
        self._loader_states[stage].switch(metrics, loader)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return optimizer groups that contain every trainable parameter once.

        Matrices get the optimizer's weight decay; vectors and norms get none. Parameters of the recurrences' gates and
        decays get no weight decay and a larger learning rate; their group stores the factor, `LR_SCALE`, as `lr_scale`.
        """
        fast = fast_parameters(self)
        numbers = {id(p) for p in fast}
        trainable = [p for p in self.parameters() if p.requires_grad and id(p) not in numbers]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trainable if p.ndim >= 2]},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
            {"params": fast, "weight_decay": 0.0, "lr_scale": LR_SCALE},
        ]
        return [g for g in groups if g["params"]]

    def configure_optimizers(self) -> Any:
        """Make the optimizer from `parameter_groups`, and the scheduler, which is stepped every batch."""
        optimizer = self.with_lr(self._make_optimizer(self.parameter_groups()))
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        if isinstance(scheduler, WarmupCosine) and scheduler.total_steps is None:
            scheduler.end_at(self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, but under bf16-mixed do not refuse fused optimizers.

        Lightning refuses them because they unscale gradients after clipping, but bf16-mixed does not scale the loss.
        """
        plugin = self.trainer.precision_plugin
        if not isinstance(plugin, MixedPrecision) or plugin.scaler is not None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val or 0.0, algorithm)


def _is_ours(method: Any) -> bool:
    return method.__module__.startswith("lightning_dilated.")
