"""LoRA of the blocks through peft (an optional extra): low-rank updates are trained beside weights that stay as they are.

Learning-rate schedules that a YAML recipe can name.

DilatedModule: the LightningModule that every model here is, and that users subclass.

Subclass it with two methods: `build()` makes the layers, `loss_terms(batch)` returns the sum of the token losses and the
number of tokens. The base class does the rest: exact token mean, metrics, optimizer, scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load as read_remote
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_dilated._compat.torch import bare_copy, real_tensors
from lightning_dilated._validation import integer
from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.models.metrics import Newest, TokenMean
from lightning_dilated.models.pretrained import Pretrained, check_classes, class_path
from lightning_dilated.models.transformer import (
    BasesLike,
    advice,
    layer_bases,
    longest,
    position_advice,
    rotary_hint,
    stored_bases,
)
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.cycle import in_turns
from lightning_dilated.pattern.explain import Explanation, explain
from lightning_dilated.pattern.layers import LayersLike, layer_patterns, plain_patterns, read_patterns
from lightning_dilated.sequence import Place, SequenceSpec, loss_share, loss_sum
from lightning_dilated.sequence.collectives import scalar

#: linear layers of a block, and parameters that are no layer of their own (q, k and v's joint projection)
LAYERS = ("out_proj", "fc1", "fc2", "gate")
PARAMETERS = ("attention.in_proj_weight",)


def add_lora(transformer: nn.Module, rank: int, alpha: float) -> None:
    """Put low-rank updates (arXiv 2106.09685), which begin at 0, beside every projection of the blocks, in place.

    Args:
        transformer: a `DilatedTransformer`.
        rank: of the updates.
        alpha: they are scaled by alpha / rank.

    Raises:
        ModuleNotFoundError: without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModuleNotFoundError("lora_rank needs peft: pip install 'lightning-dilated[lora]'.", name="peft") from None
    found = {name.rpartition(".")[2] for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}
    targets = [name for name in LAYERS if name in found]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, target_parameters=list(PARAMETERS))
    inject_adapter_in_model(config, transformer)


def merge_lora(transformer: nn.Module) -> None:
    """Add the updates to the weights and leave a plain transformer, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in reversed(list(transformer.named_modules())):  # inner ones first
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())


class WarmupCosine(LambdaLR):
    """Linear warm-up, then half a cosine down to `final_fraction` of the peak, then constant; one step a batch.

    Args:
        optimizer: whose own learning rates are the peak.
        total_steps: where the cosine ends; training may go on beyond it. None is the Trainer's `max_steps`, which
            DilatedModule fills in.
        warmup_steps: steps of the linear rise, fewer than `total_steps`.
        final_fraction: of the peak, at the end.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        final_fraction: float = 0.1,
    ) -> None:
        self.warmup_steps = integer(warmup_steps, "warmup_steps", 0)
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"final_fraction must lie in [0, 1], got {final_fraction!r}.")
        self.final_fraction = final_fraction
        self.total_steps: int | None = None
        if total_steps is not None:
            self.total_steps = integer(total_steps, "total_steps", 1)
            if self.warmup_steps >= total_steps:
                raise ValueError(f"warmup_steps={warmup_steps} must be below total_steps={total_steps}.")
        super().__init__(optimizer, self.factor)

    def end_at(self, steps: int) -> None:
        """Let the cosine end after `steps` steps, a run's length; a run shorter than the warm-up stays within it.

        Raises:
            ValueError: if the run has no length.
        """
        if steps < 1:
            raise ValueError("WarmupCosine needs total_steps, because the Trainer has no max_steps: give one of them.")
        self.total_steps = steps

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with at `step`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))


STAGES = ("train", "val", "test")


class DilatedModule(Pretrained, pl.LightningModule):
    """Base of the LightningModules.

    Args:
        optimizer: makes the optimizer from parameter groups; in YAML a `class_path` with `init_args`. AdamW by default.
            It is called in `configure_optimizers`, when the parameters are final.
        lr_scheduler: makes a scheduler from the optimizer, stepped every batch; None keeps the learning rate.

    `sequence_spec` declares which entries of a batch are sequences, for strategies that cut them; a subclass sets its own.

    Logged: `train_loss`, the mean over the tokens of a micro-batch (accumulation averages micro-batches, as Lightning
    does; a progress bar shows that of a GPU a step or two late, as `Newest` has it); `val_loss` and `test_loss`, the exact
    mean over all tokens of the epoch; and what `derived_metrics` makes of them. The layers are made by `configure_model`:
    by the Trainer, or outside one as soon as weights are asked for.
    `save_pretrained`, `from_pretrained` and `push_to_hub` come from `Pretrained`.
    """

    sequence_spec: SequenceSpec | None = None
    #: entries of a batch that stay on the CPU, where their values are read: moved, each read would wait for the device
    host_entries: tuple[str, ...] = ("lengths", "cu_seqlens")
    #: whether the pattern is one that released weights were trained with
    released_pattern = False

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self._make_optimizer, self._make_scheduler = optimizer, lr_scheduler
        self._built = False
        self._shown = Newest()
        self._patterns: tuple[DilatedPattern, ...] = ()
        self._explained: int | None = 0  # tokens of the longest sequence that the pattern was looked at for
        means = nn.ModuleDict({stage: TokenMean() for stage in STAGES[1:]})
        self.mean_loss: Mapping[str, TokenMean] = means  # type: ignore[assignment]  # torch declares plain modules

    # -- what a subclass says ----------------------------------------------------------------------------------------
    @_restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Lightning's; a class that the file names has to be imported already, or be this package's, torch's or lightning's.

        `weights_only=False` says that the file is trusted, and lets it import what it names.

        Raises:
            ValueError: naming file and class.
        """
        if hparams_file is None and weights_only is not False:
            hparams = stored_hparams(checkpoint_path)
            check_classes({k: v for k, v in hparams.items() if k not in kwargs}, checkpoint_path)
        return super().load_from_checkpoint(
            checkpoint_path, map_location, hparams_file, strict, weights_only=weights_only, **kwargs
        )

    def build(self) -> None:
        """Make the layers; called once, under the strategy's device and dtype."""
        raise TypeError(f"{type(self).__name__} must define build(), which makes its layers.")

    def loss_terms(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """(sum of the losses of the batch's tokens, number of those tokens), both scalars."""
        raise TypeError(f"{type(self).__name__} must define loss_terms(batch), which returns (sum of losses, tokens).")

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """More numbers to log beside a mean loss, by name."""
        return {}

    # -- what a subclass with dilated attention calls in its __init__ -------------------------------------------------
    def _choose_layers(
        self,
        pattern: LayersLike,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        shift_layers: str = "none",
        shift_below: int | None = None,
        rotary_base: BasesLike = None,
        max_seq_len: int | None = None,
        position_encoding: str = "none",
    ) -> None:
        """Set what differs from layer to layer, and the sizes that it depends on.

        Sets `depth`, `num_heads`, `num_kv_heads`; `pattern`, one for all layers or the tuple that repeats; `patterns`, of
        each layer; `max_seq_len`; and `rotary_bases`, of each layer, None for one without positions.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        self.depth, self.num_heads = integer(depth, "depth", 1), integer(num_heads, "num_heads", 1)
        self.pattern = read_patterns(pattern, depth, num_heads, num_kv_heads)
        self._patterns = layer_patterns(self.pattern, depth, shift_layers, shift_below)
        _, self.num_kv_heads = self._patterns[0].check_heads(num_heads, num_kv_heads)
        self.max_seq_len = max_seq_len
        self.rotary_bases = layer_bases(rotary_base, max_seq_len, depth, position_encoding)
        if position_encoding == "rotary":
            hint = rotary_hint(self.rotary_bases, self.patterns, None, max_seq_len)
            if hint:
                rank_zero_warn(f"{type(self).__name__}: {hint}")

    def _choose_own_pattern(
        self, pattern: LayersLike, depth: int, num_heads: int, padding: str, replaced: Mapping[str, Any]
    ) -> None:
        """`_choose_layers` of a pattern in place of a release's, which `replaced` and `padding` would have changed.

        To be called below an __init__, after its save_hyperparameters.
        """
        both = [name for name, value in replaced.items() if value is not None]
        if both or padding != "masked":
            raise ValueError(f"pattern takes the place of {' and '.join(both or ['padding'])}: leave one of them out.")
        self._choose_layers(pattern, depth, num_heads)
        self.save_hyperparameters({"pattern": plain_patterns(self.pattern)})

    @property
    def patterns(self) -> tuple[DilatedPattern, ...]:
        """The pattern of each layer; of a subclass with a `pattern` and a `depth` of its own, that pattern; else none."""
        own, depth = getattr(self, "pattern", None), getattr(self, "depth", None)
        if not self._patterns and isinstance(own, DilatedPattern) and isinstance(depth, int):
            return (own,) * depth
        return self._patterns

    def explain(self, seq_len: int) -> Explanation:
        """What the layers' patterns see at N tokens (see `DilatedPattern.explain`); `print` it."""
        causal = getattr(self, "causal", False)
        kv_heads = getattr(self, "num_kv_heads", None)
        return explain(self.patterns, seq_len, self.num_heads, self.depth, causal, kv_heads)

    # -- what planning asks: a subclass with `example_batch` can be planned, and searched by `plan --find-max` -----------
    #: what a token is, where it is not one of a text
    token_meaning: str | None = None
    #: what a recipe sets for sequences of {} tokens
    length_setting = "data.init_args.seq_len: {}"

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """A batch of one sequence of N random tokens on the CPU, with all that training needs.

        `plan` runs it under fake tensors, which have no values: a tensor that the model reads on the host is made by
        `host_tensor`. It asks further that `build` makes `self.transformer`, a `DilatedTransformer` of `self.depth` blocks
        with `self.patterns`, and compiles it only where `self.compile_blocks` is true.
        """
        raise TypeError(
            f"{type(self).__name__} must define example_batch(tokens), which returns a batch of one sequence of so many "
            "random tokens, to be planned or searched for its longest sequence."
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
        made = bare_copy(self)
        made._built, made._patterns = False, in_turns(self.patterns, depth) if self.patterns else ()
        changed = {"depth": depth, "pretrained": None, "compile_blocks": False}
        if bases := getattr(self, "rotary_bases", None):
            made.rotary_bases = in_turns(bases, depth)
        made.__dict__.update({name: value for name, value in changed.items() if hasattr(self, name)})
        return made

    def token_features(self) -> tuple[int, ...]:
        """Features of a token that linear layers outside of the blocks read or write, for each stack of blocks; of the
        built model. By default those of the linear layers that the model itself holds, in one stack."""
        width = self.transformer.blocks[0].ffn.fc1.in_features
        numbers = sum(layer.weight.numel() for layer in self.children() if isinstance(layer, nn.Linear))
        return (max(1, numbers // width),)

    def planning_notes(self) -> list[str]:
        """What a plan of this model takes for granted, for its reader."""
        return []

    # -- what Lightning calls ------------------------------------------------------------------------------------------
    def configure_model(self) -> None:
        """Build the layers, once: Lightning calls this at every fit, validate, test and predict."""
        io = getattr(getattr(self._trainer, "strategy", None), "checkpoint_io", None)
        if type(io) is TorchCheckpointIO:  # names the host by a function, and torch then reads no states of torchao's
            load: Any = TorchCheckpointIO.load_checkpoint  # Lightning declares map_location as a function only
            io.load_checkpoint = functools.partial(load, io, map_location="cpu")  # type: ignore[method-assign]
        if not self._built:
            self._built = True
            self.build()
            self.train(self.training)  # .eval() may have been called before there were layers

    def _built_outside(self) -> DilatedModule:
        """Build now where no Trainer will do it: whoever asks for weights outside one wants them to exist."""
        if not self._built and self._trainer is None:
            self.configure_model()
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """nn.Module's; outside a Trainer the layers are built first, likewise in the three methods below."""
        return super(DilatedModule, self._built_outside()).named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """nn.Module's."""
        return super(DilatedModule, self._built_outside()).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """nn.Module's."""
        return super(DilatedModule, self._built_outside()).load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """nn.Module's, under .to(), .double() and their like."""
        return super(DilatedModule, self._built_outside())._apply(*args, **kwargs)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Lightning's, but `host_entries` of a mapping stay on the CPU."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        if isinstance(batch, Mapping):
            for name in self.host_entries:
                if name in batch:
                    moved[name] = batch[name]
        return moved

    def _shifted(self, batch: Any) -> Any:
        """The batch; where `sequence_spec` has entries to shift and no strategy did that, they are shifted here."""
        done = hasattr(self._trainer and self._trainer.strategy, "sequence")
        return (
            batch
            if done or not (self.sequence_spec and self.sequence_spec.shift)
            else self.sequence_spec.cut(batch, Place())
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Patterns among the hyperparameters become plain mappings, so that the file loads with `weights_only=True`; and the
        module's class is named, for who reads the file without knowing it.
        """
        checkpoint["class_path"] = class_path(self)
        hparams = checkpoint.get("hyper_parameters", {})
        if hparams:
            checkpoint["hyper_parameters"] = {k: plain_value(v) for k, v in hparams.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See that the layers attend as those that were trained: weights do not show bases and patterns.

        Raises:
            ValueError: in a Trainer's run, for other rotary bases. Another pattern is reported.
        """
        hparams = checkpoint.get("hyper_parameters") or {}
        bases, theirs = getattr(self, "rotary_bases", ()), hparams.get("rotary_base")
        if self._trainer is None or not any(bases):  # outside of a run the caller has chosen them
            return
        if isinstance(theirs, (int, float, list, tuple)):
            trained = layer_bases(theirs, hparams.get("max_seq_len"), len(bases))
            if trained != tuple(bases):
                raise ValueError(
                    f"the checkpoint was trained with rotary_base={stored_bases(trained)}, and this model has "
                    f"{stored_bases(bases)}: it would compute something else. Set the model's rotary_base to the former."
                )
        stored = hparams.get("pattern")
        with contextlib.suppress(TypeError, ValueError):  # a subclass may keep something else under this name
            pattern = stored and read_patterns(stored, len(bases), self.num_heads, self.num_kv_heads)
            if pattern and pattern != self.pattern:
                rank_zero_warn(f"the checkpoint was trained with {pattern}, and this model attends by {self.pattern}.")

    def token_mean(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(mean loss over the batch's tokens, number of tokens); a batch without tokens has loss 0.

        On several ranks of a sequence: this rank's share of the mean over all ranks' tokens, and its own number of them.
        """
        total, tokens = self.loss_terms(batch)
        tokens = scalar(tokens, total.device)
        return loss_share(total, tokens), tokens

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss over the tokens of the batch (on several ranks of a sequence, this rank's share of it)."""
        share, _ = self.token_mean(self._shifted(batch))
        loss = loss_sum(share)
        self.log("train_loss", loss, batch_size=1)
        if self._trainer is not None:
            self._show(self._shown.of(loss))
        for name, value in self.derived_metrics(loss).items():
            self.log(f"train_{name}", value, batch_size=1)
        return share

    def _show(self, loss: float | None) -> None:
        if loss is not None:
            self.trainer.progress_bar_metrics["train_loss"] = loss

    def on_fit_start(self) -> None:
        """Train in training mode: Lightning keeps the mode it finds, and loaded encoders come in eval mode."""
        self._shown = Newest()  # of the device of this fit
        self.train()

    def on_train_end(self) -> None:
        """The progress bar's loss is the last step's in the end."""
        self._show(self._shown.last())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say once, after the first step (or one with a longer batch), what the pattern cannot do at that length."""
        if self._explained is None:
            return
        seq_len = longest(batch, self.sequence_spec, getattr(self.trainer.strategy, "sequence", None))
        if seq_len > self._explained:
            hints = [hint for hint in (advice(self, seq_len), position_advice(self, seq_len)) if hint]
            self._explained = None if hints else seq_len
            for hint in hints:
                rank_zero_warn(hint)

    def _evaluate(self, stage: str, batch: Any) -> None:
        self.mean_loss[stage].update(*self.loss_terms(self._shifted(batch)))

    def _report(self, stage: str) -> None:
        metric = self.mean_loss[stage]
        loss = metric.compute()  # summed over the ranks by torchmetrics
        metric.reset()
        self._log_of_all(f"{stage}_loss", loss)
        for name, value in self.derived_metrics(loss).items():
            self._log_of_all(f"{stage}_{name}", value, prog_bar=stage == "val")

    def _log_of_all(self, name: str, value: Any, **options: Any) -> None:
        """Log a value that is of all ranks already, without Lightning's advice to average it over them (`sync_dist`)."""
        warnings.filterwarnings("ignore", message=re.escape(f"It is recommended to use `self.log({name!r}"))
        self.log(name, value, **options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds the batch's tokens to the validation mean."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Adds the batch's tokens to the test mean."""
        self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        """Logs the validation mean."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Logs the test mean."""
        self._report("test")

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Every trainable parameter once: matrices with the optimizer's weight decay, vectors and norms without any.

        A group may hold `lr_scale`, which the optimizer's learning rate is multiplied with.
        """
        trainable = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trainable if p.ndim >= 2]},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        return [g for g in groups if g["params"]]

    def configure_optimizers(self) -> Any:
        """The optimizer over `parameter_groups`, and the scheduler a step."""
        optimizer = self._make_optimizer(self.parameter_groups())
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * group.pop("lr_scale", 1.0)
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
        """Lightning's, which refuses fused optimizers under mixed precision, since they undo a scaler's factor by themselves
        and later; bf16 has no scaler, so they are clipped like any other."""
        plugin = self.trainer.precision_plugin
        if not isinstance(plugin, MixedPrecision) or plugin.scaler is not None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        way = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val or 0.0, way)


def plain_value(value: Any) -> Any:
    """A hyperparameter in a checkpoint: patterns, alone or in a list, as plain mappings."""
    if isinstance(value, DilatedPattern):
        return value.to_dict()
    if isinstance(value, (list, tuple)) and any(isinstance(x, DilatedPattern) for x in value):
        return [plain_value(x) for x in value]
    return value


def stored_hparams(checkpoint_path: Any) -> dict[str, Any]:
    """The model's hyperparameters in a checkpoint: a path, an open file, or an address that Lightning can read."""
    if hasattr(checkpoint_path, "read"):
        stored = load_file(checkpoint_path)
        checkpoint_path.seek(0)
    elif Path(checkpoint_path).is_file():
        stored = load_file(checkpoint_path, mapped=True)
    elif "://" in str(checkpoint_path):
        stored = read_remote(checkpoint_path, map_location="cpu", weights_only=True)
    else:
        return {}  # Lightning says what is missing
    names = ("hparams", "module_arguments", "hyper_parameters")  # the former in files of early versions
    parts = [stored.get(name) for name in names] if isinstance(stored, Mapping) else []
    return {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}


def was_given(module: DilatedModule, name: str) -> bool:
    """Whether the caller who makes `module` passed argument `name`, or a subclass's __init__ settled it.

    To be called in an __init__: looks at the outermost __init__ that is now making the module.
    """
    frame, outermost = inspect.currentframe(), None
    while frame is not None:
        if frame.f_code.co_name == "__init__" and any(x is module for x in frame.f_locals.values()):
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return False
    names, _, keywords, values = inspect.getargvalues(outermost)
    return name in names or (keywords is not None and name in values[keywords])
