"""PooledModule, the base of models with one prediction per sequence: pooling, head, metrics and fine-tuning (LoRA).

Shape letters: B batch, N tokens, L tokens of this rank, E embedding dim, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from lightning_dilated._compat.lightning import attached_trainer
from lightning_dilated._device import send
from lightning_dilated._validation import flag, integer, real
from lightning_dilated.ext._compat.torch import version_of
from lightning_dilated.ext.pooled.heads import TASKS, make_head
from lightning_dilated.ext.pooled.samples import EpochScores
from lightning_dilated.ext.pooled.survival import quantile_edges, survival_head
from lightning_dilated.models.documents import Documents, check_mapping
from lightning_dilated.models.learning_rate import LR_SCALE, fast_parameters
from lightning_dilated.models.module import STAGES
from lightning_dilated.models.transformer_model import TransformerModel
from lightning_dilated.pattern.layers import LayersLike
from lightning_dilated.sequence import active_sequence, sequence_sum

#: linear layers of a block that get low-rank updates, and a parameter that gets one: the projection to q, k and v
LAYERS = ("out_proj", "fc1", "fc2", "gate")
PARAMETERS = ("attention.in_proj_weight",)


def add_lora(transformer: nn.Module, rank: int, alpha: float) -> None:
    """Add low-rank updates (arXiv 2106.09685), initially 0, to every projection of the blocks, in place.

    Args:
        transformer: a `DilatedTransformer`.
        rank: rank of the updates.
        alpha: the updates are scaled by alpha / rank.

    Raises:
        ModuleNotFoundError: without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModuleNotFoundError("lora_rank needs peft: pip install 'lightning-dilated[lora]'.", name="peft") from None
    linear = {name.rpartition(".")[2] for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}
    targets = [name for name in LAYERS if name in linear]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, target_parameters=list(PARAMETERS))
    inject_adapter_in_model(config, transformer)


def merge_lora(transformer: nn.Module) -> None:
    """Add the low-rank updates to the weights in place, and remove peft's layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in reversed(list(transformer.named_modules())):  # inner modules first
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())


class PooledModule(TransformerModel):
    """Base of models that make one prediction for a whole sequence; a subclass defines `build` and `embed`.

    Every rank of a sequence gets the pooled embedding and computes the same loss; metrics count each sample once.

    Args:
        pattern, options: see `TransformerModel`.
        task: "classification", "regression", "ordinal", "survival" (labels (B, 2): time, event); None: embeddings only.
        num_classes: C, the number of classes, of a regression's targets (None: 1), or of survival's bins (None: 4).
        regression_loss: "mse" or "smooth_l1".
        class_weights: factors of each class's training loss: a list of C numbers; or "balanced", S / (C S_c) for a
            class with S_c of the S training samples, so that classes count equally and a sample's mean weight is 1.
            Validation and test have no weights.
        survival_loss: "discrete", hazards in bins of time, exact for any batch and number of ranks; or "cox", the
            partial likelihood, which training estimates from a rank's batch (see `survival.CoxHead`).
        time_bins: the C - 1 edges of the bins of time; None: quantiles of the training events, saved in checkpoints.
        predict_embeddings: let `predict` return each sample's embedding in addition to its prediction.
        layer_decay: d in (0, 1]: layer i of `depth` learns with d^(depth + 1 - i) times the learning rate; the input
            projection counts as layer 0, the head and last norm as depth + 1 (as in BEiT, arXiv 2106.08254).
        freeze_encoder: train the head only; all other modules stay in eval mode.
        lora_rank: train the head, and low-rank updates of the blocks with this rank (arXiv 2106.09685; extra `lora`).
        lora_alpha: the updates are scaled by lora_alpha / lora_rank; None: twice the rank.

    Metrics of validation and test, named after the stage, as in `val_mse`, are exact over the epoch and all ranks:
    `auroc`, `balanced_accuracy` and `quadratic_kappa` of classes, `mse` and `r2`, or Harrell's `concordance`.
    """

    also_in_config = ("classes", "tile_order")
    predicts_label = predicts_rows = True
    #: prefixes of the names of parameters below the first block
    input_layers: tuple[str, ...] = ()

    def __init__(
        self,
        pattern: LayersLike,
        task: Literal["classification", "regression", "ordinal", "survival"] | None = None,
        num_classes: int | None = None,
        regression_loss: Literal["mse", "smooth_l1"] = "mse",
        class_weights: Literal["balanced"] | list[float] | None = None,
        survival_loss: Literal["discrete", "cox"] = "discrete",
        time_bins: list[float] | None = None,
        predict_embeddings: bool = False,
        layer_decay: float = 1.0,
        freeze_encoder: bool = False,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(pattern=pattern, **options)
        real(layer_decay, "layer_decay", above=0, most=1, hint=" 1 is no decay.")
        if task is None and (num_classes is not None or freeze_encoder):
            option = "freeze_encoder" if freeze_encoder else f"num_classes={num_classes}"
            raise ValueError(
                f"{option} needs a task: {', '.join(TASKS)}. For the embeddings of a trained model, keep its task and set "
                "predict_embeddings=True."
            )
        if lora_rank is not None and (task is None or freeze_encoder):
            raise ValueError("lora_rank needs a task, and freeze_encoder=False: it trains updates of the encoder.")
        self.lora_rank = None if lora_rank is None else integer(lora_rank, "lora_rank", 1)
        self.lora_alpha = 2.0 * (lora_rank or 1) if lora_alpha is None else lora_alpha
        if self.compile_blocks and lora_rank is not None:
            raise ValueError("peft's updates cannot be compiled to one graph: set compile_blocks=False with lora_rank.")
        if self.linear_dtype is not None and lora_rank is not None:
            raise ValueError("peft's updates are not offered in float8: leave out lora_rank or linear_dtype.")
        self.task, self.num_classes, self.regression_loss = task, num_classes, regression_loss
        self.class_weights = checked_weights(class_weights, task, num_classes)
        self.survival_loss, self.time_bins = survival_loss, time_bins
        if task != "survival" and (survival_loss != "discrete" or time_bins is not None):
            raise ValueError(f"survival_loss and time_bins are for task='survival', but the task is {task!r}.")
        self.predict_embeddings = flag(predict_embeddings, "predict_embeddings")
        self.layer_decay, self.freeze_encoder = layer_decay, flag(freeze_encoder, "freeze_encoder")
        self.head: nn.Module | None = None
        #: the label that was last moved to a device, its version, and the head's checked copy of it or the head's error
        self._read: tuple[Any, int, Any] = None, 0, None
        #: names of the head's classes, and the order of a slide's tiles; set in training if the data has them
        self.classes: list[str] | None = None
        self.tile_order: str | None = None
        #: factors of each class's loss in this fit
        self._loss_weights = None if self.class_weights == "balanced" else self.class_weights
        if task is not None:
            with torch.device("meta"):
                head = self._make_head()
            self.epoch_scores = nn.ModuleDict({s: EpochScores(head.columns, head.label_columns) for s in STAGES[1:]})

    # -- defined by subclasses -----------------------------------------------------------------------------------------
    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the batch's pooled embeddings (B, E), on every rank of the sequence; (D, E) for D packed samples."""
        raise TypeError(f"{type(self).__name__} must define embed(batch).")

    def _exported(self, embedding: Tensor) -> dict[str, Tensor]:
        return {"embeddings": embedding} | ({} if self.head is None else {"logits": self.head(embedding)})

    def example_label(self) -> dict[str, Tensor]:
        """Make the label of `example_batch`, for one sample.

        Raises:
            ValueError: for a model that only makes embeddings.
        """
        if self.task is None:
            raise ValueError(f"this {type(self).__name__} has no task and is not trained: give it a task to plan for.")
        if self.task == "survival":
            return {"label": torch.ones(1, 2)}
        count = self.num_classes or 1
        return {"label": torch.randn(1, count) if self.task == "regression" else torch.randint(0, count, (1,))}

    # -- building ------------------------------------------------------------------------------------------------------
    def _make_head(self) -> nn.Module | None:
        if self.task is None:
            return None
        if self.task == "survival":
            return survival_head(self.dim, self.num_classes, self.survival_loss, self.time_bins)
        return make_head(self.task, self.dim, self.num_classes, self.regression_loss)

    def planning_copy(self, depth: int) -> Self:
        """See DilatedModule; the copy has placeholder bins of time and no class weights, which depend on the data."""
        copy = super().planning_copy(depth)
        copy.class_weights = copy._loss_weights = None
        if copy.task == "survival" and copy.survival_loss == "discrete" and copy.time_bins is None:
            copy.time_bins = [float(k + 1) for k in range(self._make_head().classes - 1)]
        return copy

    def setup(self, stage: str) -> None:
        """Check that the data has `num_classes` classes, and that the model was trained on these classes."""
        super().setup(stage)
        classes = self._data_classes()
        if classes is not None and len(classes) != self.num_classes:
            raise ValueError(
                f"num_classes={self.num_classes}, but the data has {len(classes)} classes ({', '.join(classes)}): "
                f"set the model's num_classes to {len(classes)}."
            )
        if stage != "fit":  # a new fit may have other classes; a resumed fit checks them when its checkpoint is loaded
            self._check_classes(self.classes)
            self._keep_order()
        elif self.class_weights == "balanced":
            self._loss_weights = self._balanced_weights()
        if stage == "fit" and self.task == "survival":
            self._prepare_survival()

    def _balanced_weights(self) -> list[float]:
        counts = self._data_setting("class_counts")
        if counts is None:
            raise ValueError(
                "class_weights='balanced' needs the number of training samples of each class, which SlideDataModule has as "
                "`class_counts`: give your LightningDataModule such a list, or give the weights as a list."
            )
        if self._data_setting("sampling") == "balanced":
            raise ValueError(
                "class_weights='balanced' and data.sampling='balanced' would correct for rare classes twice: leave out one."
            )
        # the data warns of a class without samples; the weight of such a class has no effect
        present = sum(n > 0 for n in counts)
        return [sum(counts) / (present * n) if n else 1.0 for n in counts]

    def _prepare_survival(self) -> None:
        """Derive unset bins of time from the training data; check that Cox's likelihood has samples to compare."""
        if self.survival_loss == "cox":
            if self._data_setting("batch_size", 2) == 1 and self._data_setting("pack_tokens") is None:
                raise ValueError(
                    "survival_loss='cox' compares the samples of a batch, and data.batch_size is 1: raise it, set "
                    "data.pack_tokens, or take survival_loss='discrete', which is exact for any batch."
                )
            return
        known = self._data_setting("training_survival")
        if self.time_bins is None and known is not None:
            self.time_bins = self.hparams["time_bins"] = quantile_edges(known, self._make_head().classes)
            if self.head is not None:
                self.head.edges = self.time_bins

    def _keep_order(self) -> None:
        """Tell the data which order of tiles the model was trained with."""
        follow = self._data_setting("follow_order")
        if self.tile_order is not None and callable(follow):
            follow(self.tile_order)

    def on_train_start(self) -> None:
        """Store the data's classes and order of tiles."""
        super().on_train_start()
        self.classes, self.tile_order = self._data_classes(), self._data_setting("order")

    def _data_classes(self) -> list[str] | None:
        classes = self._data_setting("classes")
        return None if classes is None or self.task not in ("classification", "ordinal") else [str(x) for x in classes]

    def _check_classes(self, trained: list[str] | None) -> None:
        classes = self._data_classes()
        if trained is not None and classes is not None and classes != trained:
            raise ValueError(
                f"the model was trained on the classes {trained}, in this order, but the data's are {classes}: its scores "
                f"would belong to other classes. Set data.classes to {trained}, or train a new model on the data."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See DilatedModule; also save the names of the classes."""
        super().on_save_checkpoint(checkpoint)
        for name in ("classes", "tile_order"):
            if getattr(self, name) is not None:
                checkpoint[name] = getattr(self, name)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See DilatedModule; also check that the data has the checkpoint's classes."""
        super().on_load_checkpoint(checkpoint)
        if checkpoint.get("classes") is not None:
            self._check_classes(checkpoint["classes"])
            self.classes = checkpoint["classes"]
        bins = (checkpoint.get("hyper_parameters") or {}).get("time_bins")
        if self.task == "survival" and bins is not None:
            self.time_bins = self.hparams["time_bins"] = list(bins)
            if self.head is not None:
                self.head.edges = self.time_bins
        # slide checkpoints without an order are older: they were trained in the order of the files
        self.tile_order = checkpoint.get("tile_order", "file" if "SlideDataModule" in checkpoint else None)
        if attached_trainer(self) is not None:
            self._keep_order()

    def configure_model(self) -> None:
        """Build the layers once, and freeze parameters that are not trained."""
        fresh = not self._built
        super().configure_model()
        if fresh and self.lora_rank is not None:
            add_lora(self.transformer, self.lora_rank, self.lora_alpha)
            self.transformer.train(self.training)
        if fresh and (self.freeze_encoder or self.lora_rank is not None):
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.startswith("head.") or ".lora_" in name)

    def merge_lora(self) -> None:
        """Add the low-rank updates to the weights; the model then has no `lora_rank`."""
        if self.lora_rank is not None:
            merge_lora(self.transformer)
            self.lora_rank = self.hparams["lora_rank"] = None

    def train(self, mode: bool = True) -> PooledModule:
        """See nn.Module; a frozen encoder stays in eval mode."""
        super().train(mode)
        if self.freeze_encoder:
            for name, child in self.named_children():
                if name != "head":
                    child.eval()
        return self

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _outcome(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return logits (B, C) and the checked labels."""
        if self.task is None:
            raise ValueError(
                f"this {type(self).__name__} makes embeddings only: give task and num_classes to train it."
            )
        check_mapping(self, batch, "the model's input and label (B,)", "label")
        if "label" not in batch:
            raise ValueError(f"the batch holds {list(batch)}, but no label, which training and evaluation need.")
        self.configure_model()
        label = checked_by_all(self._checked, batch["label"])
        return self.head(self.embed(batch)), send(label, self.head.linear.weight.device)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """See DilatedModule; labels are checked on the CPU first, because reading them from a GPU would wait for it."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        if self.head is not None and isinstance(batch, Mapping) and "label" in batch:
            try:
                checked = self.head.check(torch.as_tensor(batch["label"]))
            except (TypeError, ValueError) as error:  # the error is raised in the step, where all ranks raise together
                checked = error
            label = moved["label"]
            versioned = isinstance(label, Tensor) and not label.is_inference()
            self._read = (label, version_of(label), checked) if versioned else (None, 0, None)
        return moved

    def _checked(self, label: Any) -> Tensor:
        """Return the head's checked labels; read them from the device only if they changed after they were moved."""
        moved, version, checked = self._read
        if moved is None or label is not moved or version_of(label) != version:
            return self.head.check(torch.as_tensor(label))
        if isinstance(checked, Exception):
            raise checked
        return checked

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Return the class-weighted sum of losses and the number of samples, the same on all ranks of the sequence.

        For Cox's likelihood, the second value is the number of events.
        """
        logits, label = self._outcome(batch)
        losses = self.head.losses(logits, label)
        if self.class_weights is not None:
            losses = losses * self._weights(losses)[label]
        return losses.sum(), self.head.count(label)

    def _weights(self, losses: Tensor) -> Tensor:
        """Return the weights of the classes, (C,), with the dtype and device of `losses`."""
        if self._loss_weights is None:
            raise ValueError(
                "class_weights='balanced' counts the training samples when fit begins; without Trainer.fit give a list."
            )
        return send(torch.tensor(self._loss_weights, dtype=losses.dtype), losses.device)

    def _evaluate(self, stage: str, batch: Any) -> None:
        logits, label = self._outcome(batch)
        if not self.head.of_epoch:
            self.mean_loss[stage].update(self.head.losses(logits, label).sum(), self.head.count(label))
        group = active_sequence()
        count = len(label) if group is None or group.rank == 0 else 0  # counts each sample once
        index = batch["index"][:count] if "index" in batch else None
        self.epoch_scores[stage].update(self.head.scores(logits)[:count], label[:count], index)

    def _report(self, stage: str) -> None:
        metric = self.epoch_scores[stage]
        scores, labels, _ = metric.whole_epoch()  # from all ranks, gathered by torchmetrics
        if self.head.of_epoch:  # all ranks add the same sum and count, so the mean does not change
            self.mean_loss[stage].update(self.head.losses(scores, labels).sum(), self.head.count(labels))
        super()._report(stage)
        metric.reset()
        for i, (name, value) in enumerate(self.head.metrics(scores, labels).items()):
            # only one metric, because Rich truncates a longer progress bar
            self._log_of_all(f"{stage}_{name}", value.float(), prog_bar=stage == "val" and i == 0)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the batch's `index`, `slide_id` and `label`, if it has them, and the head's predictions, each (B,).

        Without a task, or with `predict_embeddings`, `embedding` (B, E) is also returned. Survival labels are returned
        as `time` and `event`. `prediction_class` is the name of the predicted class, if the training data named its
        classes. A label that the Trainer's precision has rounded is left out.
        """
        self.configure_model()
        embedding = self.embed(batch)
        known = {name: batch[name] for name in ("index", "slide_id", "label") if name in batch}
        if self.head is None:
            return {**known, "embedding": embedding}
        if getattr(known.get("label"), "dtype", None) in (torch.bfloat16, torch.float16):
            del known["label"]
        if self.task == "survival" and "label" in known:
            known["time"], known["event"] = known.pop("label").unbind(1)
        predictions = self.head.predictions(self.head(embedding))
        if self.predict_embeddings:
            predictions["embedding"] = embedding
        if self.classes is not None:
            known["prediction"] = predictions["prediction"]
            known["prediction_class"] = [self.classes[i] for i in predictions["prediction"].tolist()]
        return {**known, **predictions}

    # -- fine-tuning ---------------------------------------------------------------------------------------------------
    def layer_of(self, name: str) -> int:
        """Return the layer of a parameter: 0 below the blocks, i + 1 in block i, depth + 1 above the blocks."""
        block = re.search(r"\bblocks\.(\d+)\.", name)
        return int(block[1]) + 1 if block else 0 if name.startswith(self.input_layers) else self.depth + 1

    def parameter_groups(self) -> list[dict[str, Any]]:
        """See DilatedModule; `layer_decay` gives each layer its own groups, with a factor of the rate, `lr_scale`."""
        if self.layer_decay == 1:
            return super().parameter_groups()
        groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
        fast = {id(p) for p in fast_parameters(self)}
        for name, p in self.named_parameters():
            if p.requires_grad:
                layer, decays, is_fast = self.layer_of(name), p.ndim >= 2, id(p) in fast
                scale = self.layer_decay ** (self.depth + 1 - layer) * (LR_SCALE if is_fast else 1)
                empty = {"params": [], "lr_scale": scale}
                group = groups.setdefault((layer, decays, is_fast), empty if decays else {**empty, "weight_decay": 0.0})
                group["params"].append(p)
        return [groups[key] for key in sorted(groups)]


def checked_weights(weights: Any, task: str | None, num_classes: int | None) -> Any:
    """Return `class_weights` as "balanced", a list of floats or None; raise TypeError or ValueError otherwise."""
    if weights is None or (weights == "balanced" and task in ("classification", "ordinal")):
        return weights
    if task not in ("classification", "ordinal"):
        raise ValueError(f"class_weights are for task='classification' or 'ordinal', but the task is {task!r}.")
    if isinstance(weights, (list, tuple)):
        weights = [real(w, f"class_weights[{i}]", least=0) for i, w in enumerate(weights)]
    if not isinstance(weights, list) or len(weights) != num_classes:
        raise ValueError(f"class_weights must be 'balanced' or a list of {num_classes} numbers, got {weights!r}.")
    return weights


def checked_by_all(check: Any, *arguments: Any) -> Any:
    """Run check(*arguments); if it raises on one rank of a sequence, all ranks raise."""
    group = active_sequence()
    return check(*arguments) if group is None else group.guard(check, *arguments)


def first_token(x: Tensor, positions: Tensor, documents: Documents | None = None) -> Tensor:
    """Return the token of x (B, L, E) at global position 0, (B, E), on every rank. `positions` (L,) are global.

    For a row of D `documents`, return the first token of each document, (D, E).
    """
    if documents is not None:
        return documents.first(x)
    # in every layout, position 0 is the first position of one rank's shard
    holds = active_sequence() is None or bool((positions[:1] == 0).any())
    return sequence_sum(x[:, : int(holds)].sum(1))  # the empty sum of other ranks keeps x in their graphs


def check_lengths(lengths: Any, rows: int, least: int, what: str) -> Tensor | None:
    """Return lengths (B,) int64 on the CPU. Raises ValueError for a length below `least` or above `rows` >= 0.

    While torch traces the call, values are not checked, because the graph must work for any values.
    """
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.is_floating_point() or lengths.ndim != 1:
        raise TypeError(f"lengths must be integers (B,), got {lengths.dtype} of shape {tuple(lengths.shape)}.")
    for i, n in enumerate([] if torch.compiler.is_compiling() else lengths.tolist()):
        if n < least or 0 <= rows < n:
            limit = f" to {rows}" if rows >= 0 else " at least"
            raise ValueError(f"lengths[{i}] is {n}; {what}, so it must be {least}{limit}.")
    return lengths.long()
