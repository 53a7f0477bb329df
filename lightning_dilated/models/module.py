"""DilatedModule, the LightningModule that all models are and that users subclass.

A subclass defines two methods: `build()` makes the layers, `loss_terms(batch)` returns the sum of the token losses and the
number of tokens. The base class does the rest: exact token mean, metrics, optimizer, scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dilated._compat.lightning import (
    LOADED,
    attached_trainer,
    checkpoint_after_optimizer_steps,
    combined_loaders,
    evaluated_loaders,
    load_to_cpu_by_name,
    made_from_checkpoint,
    restricted_classmethod,
)
from lightning_dilated._compat.torch import bare_copy, real_tensors
from lightning_dilated._extensions import hook
from lightning_dilated._validation import check_input
from lightning_dilated.data.module import rebuilt
from lightning_dilated.models.learning_rate import LR_SCALE, LearningRate, WarmupCosine, fast_parameters
from lightning_dilated.models.metrics import LoaderStates, Newest, TokenMean, batches_in, each_batch
from lightning_dilated.models.pretrained import Pretrained, class_in_file, class_path, file_arguments, made_values
from lightning_dilated.models.stored import plain_value, read_hparams, read_model, stored_hparams
from lightning_dilated.models.transformer import (
    DilatedTransformer,
    layer_bases,
    longest,
    position_advice,
    stored_bases,
)
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.layers import read_patterns
from lightning_dilated.pattern.rows import in_turns
from lightning_dilated.recurrence.description import (
    layer_recurrences,
    plain_recurrences,
    reach_in_words,
    without_starts,
)
from lightning_dilated.sequence import Place, SequenceSpec, loss_share, loss_sum
from lightning_dilated.sequence.collectives import scalar

if TYPE_CHECKING:
    from lightning_dilated.pattern import Explanation


STAGES = ("train", "val", "test")


class DilatedModule(Pretrained, LearningRate):
    """Base of the LightningModules.

    Args:
        optimizer: makes the optimizer from parameter groups; in YAML a `class_path` with `init_args`. AdamW by default.
            It is called in `configure_optimizers`, when the parameters are final. `model.lr` is its learning rate.
        lr_scheduler: makes a scheduler from the optimizer, stepped every batch; None keeps the learning rate.

    A subclass sets `sequence_spec`, which declares the entries of a batch that are sequences, for strategies that shard
    them.

    Logged: `train_loss`, the mean over the tokens of a micro-batch (accumulation averages micro-batches, as Lightning
    does; the progress bar shows a GPU's a step or two late, see `Newest`); `val_loss` and `test_loss`, the exact mean over
    all tokens of the epoch; and the `derived_metrics` of each. The Trainer makes the layers, through `configure_model`;
    outside of one they are made when weights are first accessed. `save_pretrained`, `from_pretrained` and `push_to_hub` come
    from `Pretrained`.

    Raises:
        TypeError: if `optimizer` or `lr_scheduler` cannot be called.
    """

    sequence_spec: SequenceSpec | None = None
    #: entries of a batch that stay on the CPU, where their values are read: reading from a device would wait for it
    host_entries: tuple[str, ...] = ("lengths", "cu_seqlens")
    #: attributes besides hyperparameters that config.json has, each a string or a list of strings
    also_in_config: tuple[str, ...] = ()
    #: whether a batch has a `label` to predict, and whether the prediction is the next token
    predicts_label = False
    predicts_next_token = False
    #: whether `predict_step` returns rows for PredictionWriter
    predicts_rows = False
    #: whether a command takes `max_seq_len` from the data if a recipe has none
    length_from_data = False
    #: whether shards may be zigzag under `layout="auto"`: the model takes positions from the group of ranks, and mixes
    #: tokens by this package's layers only
    takes_any_layout = False
    #: whether the pattern is that of released weights
    released_pattern = False
    depth: int
    num_heads: int
    num_kv_heads: int | None

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function of parameters, such as torch.optim.AdamW; got {value!r}.")
        self._make_optimizer, self._make_scheduler = optimizer, lr_scheduler
        self._built = False
        self._shown = Newest()
        self._suffix = ""  # of the names of metrics that are logged
        self._loader_states = {stage: LoaderStates() for stage in STAGES}
        self._patterns: tuple[DilatedPattern, ...] = ()
        self._explained: int | None = 0  # longest sequence that the pattern was checked for; None: advice was given
        self._warned_of_length = False
        means = nn.ModuleDict({stage: TokenMean() for stage in STAGES[1:]})
        self.mean_loss: Mapping[str, TokenMean] = means  # type: ignore[assignment]  # torch declares plain modules

    # -- what a subclass defines -------------------------------------------------------------------------------------
    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Lightning's, but a file's hyperparameters are plain values, which no parser reads.

        The file's class is taken where it is imported and a subclass of this one; its optimizer and scheduler are not.

        Args:
            map_location, strict: as of Lightning.
            hparams_file: a csv or YAML of hyperparameters, in place of the checkpoint's, under the same rules.
            weights_only: False declares the pickle trusted.
            kwargs: arguments of the class, in place of the file's.

        Raises:
            ValueError: naming file and class.
        """
        check_input(checkpoint_path)
        stored = read_model(checkpoint_path, map_location, weights_only)
        where = checkpoint_path if hparams_file is None else hparams_file
        hparams = stored_hparams(stored) if hparams_file is None else read_hparams(Path(hparams_file))
        which = class_in_file(cls, hparams.get("_class_path") or cls.__name__, where, "load_from_checkpoint")
        arguments = {k: made_values(v) for k, v in file_arguments(hparams, where, kwargs).items()}
        return made_from_checkpoint(which, {**stored, "hyper_parameters": arguments}, strict, kwargs)

    def build(self) -> None:
        """Make the layers; called once, under the strategy's device and dtype."""
        raise TypeError(f"{type(self).__name__} must define build(), which makes its layers.")

    def loss_terms(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """(sum of the losses of the batch's tokens, number of those tokens), both scalars."""
        raise TypeError(f"{type(self).__name__} must define loss_terms(batch), which returns (sum of losses, tokens).")

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Further numbers to log with a mean loss, a scalar, by name; not of a loss that a subclass redefines after the
        class that defines them: it may mean something else."""
        return {}

    def _derived(self, loss: Tensor) -> dict[str, Tensor]:
        """`derived_metrics` of the loss that they were defined for, else none."""
        names = {"derived_metrics", "loss_terms", "token_losses", "token_mean"}
        latest = next(x for owner in (self, *type(self).__mro__) if (x := names & vars(owner).keys()))
        return self.derived_metrics(loss) if "derived_metrics" in latest else {}

    @property
    def patterns(self) -> tuple[DilatedPattern, ...]:
        """The pattern of each layer; of a subclass that sets `pattern` and `depth`, that pattern; else none."""
        pattern, depth = getattr(self, "pattern", None), getattr(self, "depth", None)
        if not self._patterns and isinstance(pattern, DilatedPattern) and isinstance(depth, int):
            return (pattern,) * depth
        return self._patterns

    def explain(self, seq_len: int) -> Explanation:
        """What the layers' patterns reach at N tokens (see `DilatedPattern.explain`); `print` it."""
        causal = getattr(self, "causal", False)
        kv_heads = getattr(self, "num_kv_heads", None)
        seen = hook("explain patterns")(self.patterns, seq_len, self.num_heads, self.depth, causal, kv_heads)
        recurrences, dim = getattr(self, "recurrences", ()), int(getattr(self, "dim", self.num_heads))
        return replace(seen, beyond=reach_in_words(recurrences, dim // self.num_heads)) if any(recurrences) else seen

    # -- what export asks ----------------------------------------------------------------------------------------------
    #: rows that the model adds to the length of its inputs, such as a class token's
    export_rows = 0

    def export_inputs(self, length: int, batch_size: int) -> dict[str, Tensor]:
        """Random tensors that the exported model takes, by name, of (batch_size, length, ...), on the model's device."""
        raise TypeError(f"{type(self).__name__} must define export_inputs(length, batch_size) to be exported.")

    def export_outputs(self, **inputs: Tensor) -> dict[str, Tensor]:
        """What the exported model returns for tensors (batch_size, length, ...), by name."""
        raise TypeError(f"{type(self).__name__} must define export_outputs(**inputs) to be exported.")

    # -- what planning asks: a subclass with `example_batch` can be planned ----------------------------------------------
    #: what a token is, where it is not one of a text
    token_meaning: str | None = None

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """A batch of one sequence of N random tokens on the CPU, with all that training needs.

        `plan` runs it under fake tensors, which have no values: a tensor that the model reads on the host is made by
        `host_tensor`. It asks further that `build` makes `self.transformer`, a `DilatedTransformer` of `self.depth` blocks
        with `self.patterns`, and compiles it only where `self.compile_blocks` is true.
        """
        raise TypeError(
            f"{type(self).__name__} must define example_batch(tokens), a batch of one sequence of as many random "
            "tokens, to be planned."
        )

    @staticmethod
    def host_tensor(values: Any) -> Tensor:
        """A tensor of numbers on the CPU that has its values while planning, too."""
        with real_tensors():
            return torch.tensor(values)

    def planning_copy(self, depth: int) -> Self:
        """The model with another number of blocks, without layers, pretrained weights and compilation; `build` makes them.

        Redefine it where the loss reads values of tensors, which fake tensors do not have.
        """
        copy: Any = bare_copy(self)
        copy._built, copy._patterns = False, in_turns(self.patterns, depth) if self.patterns else ()
        changed = {"depth": depth, "pretrained": None, "compile_blocks": False, "linear_dtype": None}
        for name in ("rotary_bases", "recurrences"):
            if layers := getattr(self, name, None):
                setattr(copy, name, in_turns(layers, depth))
        copy.__dict__.update({name: value for name, value in changed.items() if hasattr(self, name)})
        return copy

    def token_features(self) -> tuple[int, ...]:
        """Features of a token that linear layers outside of the blocks read or write, for each stack of blocks; of the
        built model. By default those of the linear layers that the model itself holds, in one stack."""
        transformer: Any = self.transformer
        width = transformer.blocks[0].ffn.fc1.in_features
        numbers = sum(layer.weight.numel() for layer in self.children() if isinstance(layer, nn.Linear))
        return (max(1, numbers // width),)

    def reads_logits(self) -> bool:
        """Whether the loss of a token reads logits over the first of `token_features`; of the built model."""
        return isinstance(getattr(self, "head", None), nn.Linear)  # as `step_flops` takes it

    def planning_notes(self) -> list[str]:
        """What a plan of this model takes for granted, for its reader."""
        return []

    # -- what Lightning calls ------------------------------------------------------------------------------------------
    def configure_model(self) -> None:
        """Build the layers, once: Lightning calls this at every fit, validate, test and predict."""
        load_to_cpu_by_name(getattr(attached_trainer(self), "strategy", None), check_input)
        if not self._built:
            checkpoint, strict = LOADED.get() or ({}, None)
            # a hook of another package may still replace the tensors: Lightning calls it on a built model
            replaced = not _is_ours(type(self).on_load_checkpoint)
            if isinstance(state := checkpoint.get("state_dict"), Mapping) and not replaced:
                self.load_without_values(state, whole=strict is not False)
            self._built = True
            self.build()
            self.train(self.training)  # .eval() may have been called before there were layers

    def _built_outside(self) -> DilatedModule:
        """Self, with layers where no Trainer will make them."""
        if not self._built and attached_trainer(self) is None:
            self.configure_model()
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """nn.Module's; outside of a Trainer the layers are built first, as in the three methods below."""
        return super(DilatedModule, self._built_outside()).named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        return super(DilatedModule, self._built_outside()).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super(DilatedModule, self._built_outside()).load_state_dict(*args, **kwargs)

    def load_without_values(self, state_dict: Mapping[str, Any], whole: bool = True) -> Self | None:
        """Compare a state dict with the layers, before these are made: a file may declare sizes that no memory holds.

        Args:
            whole: whether the state dict is to hold all tensors.

        Returns:
            The model on the meta device; None for a `build` of another package that needs values.

        Raises:
            ValueError: for more layers than tensors; not for a `build` of another package, in which layers may be one.
            RuntimeError: as nn.Module's `load_state_dict`, for tensors of another size.
        """
        depth, own = getattr(self, "depth", 0), _is_ours(type(self).build)
        if own and whole and isinstance(depth, int) and depth > len(state_dict):
            raise ValueError(
                f"the hyperparameters declare depth={depth:,}, but there are {len(state_dict):,} tensors: they are those of "
                "another model, or the file is not whole."
            )
        blank: Any = self.planning_copy(depth)
        blank._built = True
        with torch.device("meta"), warnings.catch_warnings():
            try:
                blank.build()
            except (RuntimeError, TypeError):  # of tensors without values
                if own:
                    raise
                return None
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            nn.Module.load_state_dict(blank, state_dict, strict=False)
        return blank

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """nn.Module's, which .to(), .double() and the like call."""
        return super(DilatedModule, self._built_outside())._apply(*args, **kwargs)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Lightning's, but `host_entries` of a mapping stay where they are."""
        if self._are_several(batch):
            return each_batch(
                batch, self._loaders(), lambda x: self.transfer_batch_to_device(x, device, dataloader_idx)
            )
        if not (isinstance(batch, Mapping) and batch.keys() & set(self.host_entries)):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        rest = {name: x for name, x in batch.items() if name not in self.host_entries}
        moved = super().transfer_batch_to_device(rest, device, dataloader_idx)
        return rebuilt(batch, {name: moved.get(name, x) for name, x in batch.items()})

    def _loaders(self) -> Any:
        """The loaders whose batches come together in this stage; None where they come one by one."""
        trainer = attached_trainer(self)
        return None if trainer is None else combined_loaders(trainer)

    def _are_several(self, batch: Any) -> bool:
        """Return whether a batch is made of the batches of several loaders."""
        parts = batches_in(batch, self._loaders())
        return len(parts) != 1 or parts[0] is not batch

    def _shifted(self, batch: Any) -> Any:
        """The batch, with the entries shifted that `sequence_spec` wants shifted, unless a strategy has done so."""
        done = hasattr(getattr(attached_trainer(self), "strategy", None), "sequence")
        if done or not (self.sequence_spec and self.sequence_spec.shift):
            return batch
        return self.sequence_spec.cut(batch, Place())

    def _data_setting(self, name: str, default: Any = None) -> Any:
        """An attribute of the Trainer's datamodule, if there are both."""
        return getattr(getattr(attached_trainer(self), "datamodule", None), name, default)

    def _optimizer_step(self) -> int:
        """The Trainer's, 0 without one."""
        return getattr(attached_trainer(self), "global_step", 0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write patterns among the hyperparameters as plain mappings, so that the file loads with `weights_only=True`, and
        the name of the module's class."""
        checkpoint["class_path"] = class_path(self)
        hparams = checkpoint.get("hyper_parameters", {})
        if hparams:
            checkpoint["hyper_parameters"] = {k: plain_value(v) for k, v in hparams.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the layers attend as the trained ones did, which weights do not show.

        Raises:
            ValueError: in a Trainer's run, for other rotary bases or recurrences. Another pattern is reported.
        """
        hparams = checkpoint.get("hyper_parameters") or {}
        bases, theirs = getattr(self, "rotary_bases", ()), hparams.get("rotary_base")
        if attached_trainer(self) is None or not bases:  # outside of a run the caller chose them
            return
        if any(bases) and isinstance(theirs, (int, float, list, tuple)):
            trained = layer_bases(theirs, hparams.get("max_seq_len"), len(bases))
            if trained != tuple(bases):
                raise ValueError(
                    f"the checkpoint was trained with rotary_base={stored_bases(trained)}, and this model has "
                    f"{stored_bases(bases)}, with which it would compute something else. Set rotary_base to the former."
                )
        self._check_recurrences(hparams)
        stored = hparams.get("pattern")
        with contextlib.suppress(TypeError, ValueError):  # a subclass may store something else under this name
            pattern = stored and read_patterns(stored, len(bases), self.num_heads, self.num_kv_heads)
            if pattern and pattern != self.pattern:
                rank_zero_warn(f"the checkpoint was trained with {pattern}, and this model attends by {self.pattern}.")

    def _check_recurrences(self, hparams: Mapping[str, Any]) -> None:
        """Raise ValueError where the layers of the checkpoint had other recurrences than these have, but for `gate_init`:
        trained gates are in the weights."""
        ours = getattr(self, "recurrences", None)
        if ours is None or "recurrence" not in hparams:
            return
        try:
            theirs = layer_recurrences(hparams["recurrence"], len(ours), getattr(self, "causal", False))
        except (TypeError, ValueError):  # of a model of another depth, or that was not causal
            theirs = None
        if theirs is None or without_starts(theirs) != without_starts(ours):
            raise ValueError(
                f"the checkpoint was trained with recurrence={hparams['recurrence']!r}, and this model has "
                f"{plain_recurrences(ours)!r}, with which it would compute something else. Set recurrence to the former."
            )

    def token_mean(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(mean loss over the batch's tokens, number of tokens); a batch without tokens has loss 0.

        On several ranks of a sequence: this rank's share of the mean over all ranks' tokens, and its own number of them. Of
        batches that CombinedLoader puts together: over all of their tokens.
        """
        terms = [self.loss_terms(part) for part in batches_in(batch, self._loaders())]
        total = functools.reduce(operator.add, (losses for losses, _ in terms))
        tokens = functools.reduce(operator.add, (scalar(count, total.device) for _, count in terms))
        return loss_share(total, tokens), tokens

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss over the tokens of the batch (on several ranks of a sequence, this rank's share of it)."""
        share, _ = self.token_mean(each_batch(batch, self._loaders(), self._shifted))
        loss = loss_sum(share)
        self.log("train_loss", loss, batch_size=1)
        if attached_trainer(self) is not None:
            self._show(self._shown.of(loss))
        for name, value in self._derived(loss).items():
            self.log(f"train_{name}", value, batch_size=1)
        return share

    def _show(self, loss: float | None) -> None:
        if loss is not None:
            self.trainer.progress_bar_metrics["train_loss"] = loss

    def on_fit_start(self) -> None:
        """Switch to training mode: Lightning leaves the mode alone, and loaded encoders are in eval mode."""
        checkpoint_after_optimizer_steps(self.trainer)
        self._shown = Newest()  # the device may be another than in the last fit
        self.train()

    def on_train_end(self) -> None:
        """Show the last step's loss in the progress bar; free what only training steps need."""
        self._show(self._shown.last())
        for module in self.modules():
            if isinstance(module, DilatedTransformer) and module.graphs is not None:
                module.graphs.free()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Warn once, after the first step or one with a longer batch, of what the pattern cannot do at that length; and of
        a sequence of more than `max_seq_len` tokens."""
        made_for = None if self._warned_of_length else getattr(self, "max_seq_len", None)
        if self._explained is None and made_for is None:
            return
        seq_len = max(self._longest(part) for part in batches_in(batch, self._loaders()))
        if made_for is not None and seq_len > made_for:
            self._warned_of_length = True
            rank_zero_warn(
                f"{type(self).__name__} is made for max_seq_len={made_for:,}, and trains on a sequence of {seq_len:,} "
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
        """N of the longest sequence or document of a training batch, for which the pattern is checked; 0: unknown."""
        return longest(batch, self.sequence_spec, getattr(self.trainer.strategy, "sequence", None))

    def _evaluate(self, stage: str, batch: Any) -> None:
        self.mean_loss[stage].update(*self.loss_terms(self._shifted(batch)))

    def _report(self, stage: str) -> None:
        metric = self.mean_loss[stage]
        loss = metric.compute()  # summed over the ranks by torchmetrics
        metric.reset()
        self._log_of_all(f"{stage}_loss", loss)
        for name, value in self._derived(loss).items():
            self._log_of_all(f"{stage}_{name}", value, prog_bar=stage == "val")

    def _log_of_all(self, name: str, value: Any, **options: Any) -> None:
        """Log a value that covers all ranks already, without Lightning's advice to average it over them (`sync_dist`)."""
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
        """Count a batch, or batches that CombinedLoader puts together, among those of its loader."""
        self._of_loader(stage, loader)
        for part in batches_in(batch, self._loaders()):
            self._evaluate(stage, part)

    def _report_all(self, stage: str) -> None:
        """Log the metrics of a stage; those of several loaders by loader, as Lightning names them."""
        loaders = evaluated_loaders(self.trainer) if attached_trainer(self) is not None else 1
        for loader in range(loaders):
            self._of_loader(stage, loader)
            self._suffix = f"/dataloader_idx_{loader}" if loaders > 1 else ""
            self._report(stage)
        self._suffix = ""
        self._of_loader(stage, 0)

    def _of_loader(self, stage: str, loader: int) -> None:
        """Let the metrics of a stage be a loader's."""
        groups = [x for x in self.children() if isinstance(x, nn.ModuleDict) and stage in x]
        metrics = [metric for x in groups if isinstance(metric := x[stage], Metric)]
        self._loader_states[stage].switch(metrics, loader)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Every trainable parameter once: matrices with the optimizer's weight decay, vectors and norms without; the gates
        and decays of recurrences without, and at `LR_SCALE` times the rate.

        A group may hold `lr_scale`, a factor of the optimizer's learning rate.
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
        """The optimizer over `parameter_groups`, and the scheduler a step."""
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
        """Lightning's, but for fused optimizers under bf16-mixed, which Lightning refuses to clip: they unscale gradients
        after clipping, but bf16 has no scaler."""
        plugin = self.trainer.precision_plugin
        if not isinstance(plugin, MixedPrecision) or plugin.scaler is not None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val or 0.0, algorithm)


def _is_ours(method: Any) -> bool:
    return method.__module__.startswith("lightning_dilated.")
