"""PooledModule: what models with one prediction a sequence share: pooling, head, metrics, and how they are fine-tuned.

Shape letters: B batch, N tokens, L tokens of this rank, E embedding dim, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.models.heads import make_head
from lightning_dilated.models.metrics import EpochScores
from lightning_dilated.models.module import STAGES, DilatedModule, add_lora, merge_lora
from lightning_dilated.sequence import active_sequence, sequence_mean, sequence_sum


class PooledModule(DilatedModule):
    """Base of the models that predict one thing of a whole sequence; a subclass defines `build` and `embed`.

    Every rank of a sequence gets the pooled embedding and computes head and loss alike; metrics count each sample once.

    Args:
        dim: E, of the embedding.
        depth: layers, for `layer_decay`.
        task: "classification", "regression", "ordinal", or None for embeddings only.
        num_classes: C; targets of a regression, 1 if None.
        regression_loss: "mse" or "smooth_l1".
        layer_decay: d in (0, 1]: layer i of `depth` learns with d^(depth + 1 - i) times the learning rate; the input
            projection counts as layer 0, the head and last norm as depth + 1 (as in BEiT, arXiv 2106.08254).
        freeze_encoder: train the head only; the rest stays in eval mode.
        lora_rank, lora_alpha: train the head and low-rank updates of the blocks (see `models.lora`; needs the extra `lora`);
            alpha None is twice the rank.
        optimizer, lr_scheduler: see `DilatedModule`.

    Logged beside `val_loss` and `test_loss`, exact over the epoch and all ranks: `auroc`, `balanced_accuracy` and
    `quadratic_kappa`, or `mse` and `r2`, each with the stage's name in front.
    """

    #: first parts of the names of the parameters below the first block
    input_layers: tuple[str, ...] = ()

    def __init__(
        self,
        dim: int,
        depth: int,
        task: str | None,
        num_classes: int | None,
        regression_loss: str = "mse",
        layer_decay: float = 1.0,
        freeze_encoder: bool = False,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if isinstance(layer_decay, bool) or not isinstance(layer_decay, (int, float)) or not 0 < layer_decay <= 1:
            raise ValueError(f"layer_decay must lie in (0, 1], 1 for none; got {layer_decay!r}.")
        if task is None and (num_classes is not None or freeze_encoder):
            given = "freeze_encoder" if freeze_encoder else f"num_classes={num_classes}"
            raise ValueError(f"{given} needs a task: classification, regression or ordinal.")
        if lora_rank is not None and (task is None or freeze_encoder):
            raise ValueError("lora_rank needs a task, and freeze_encoder=False: it trains updates of the encoder.")
        self.lora_rank = None if lora_rank is None else integer(lora_rank, "lora_rank", 1)
        self.lora_alpha = 2.0 * (lora_rank or 1) if lora_alpha is None else lora_alpha
        self.dim, self.depth, self.task = dim, depth, task
        self.num_classes, self.regression_loss = num_classes, regression_loss
        self.layer_decay, self.freeze_encoder = layer_decay, freeze_encoder
        self.head: nn.Module | None = None
        #: the label that was last moved to a device, its version, and what the head took it for, or the error that it raised
        self._read: tuple[Any, int, Any] = None, 0, None
        #: the classes that the outputs of the head stand for, once trained on data that names them
        self.classes: list[str] | None = None
        if task is not None:
            with torch.device("meta"):
                head = self._make_head()
            columns = head.classes if task == "regression" else None
            self.epoch_scores = nn.ModuleDict({s: EpochScores(head.classes, columns) for s in STAGES[1:]})

    # -- what a subclass says ----------------------------------------------------------------------------------------
    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, E) pooled embeddings of a batch, on every rank of the sequence."""
        raise TypeError(f"{type(self).__name__} must define embed(batch).")

    def example_label(self) -> dict[str, Tensor]:
        """The part of `example_batch` that tells what to predict of one sample.

        Raises:
            ValueError: for a model that only makes embeddings.
        """
        if self.task is None:
            raise ValueError(
                f"this {type(self).__name__} has no task, so it is not trained: give it a task to plan for."
            )
        count = self.num_classes or 1
        return {"label": torch.randn(1, count) if self.task == "regression" else torch.randint(0, count, (1,))}

    # -- building ------------------------------------------------------------------------------------------------------
    def _make_head(self) -> nn.Module | None:
        return None if self.task is None else make_head(self.task, self.dim, self.num_classes, self.regression_loss)

    def _compiled(self, compile_blocks: bool) -> bool:
        if compile_blocks and self.lora_rank is not None:
            raise ValueError(
                "peft's updates cannot be compiled to one graph: set compile_blocks=False beside lora_rank."
            )
        return compile_blocks

    def setup(self, stage: str) -> None:
        """See that the data has a class for each output, and the classes that were trained on."""
        super().setup(stage)
        classes = self._data_classes()
        if classes is not None and len(classes) != self.num_classes:
            raise ValueError(
                f"num_classes={self.num_classes}, but the data has {len(classes)} classes ({', '.join(classes)}): "
                f"set the model's num_classes to {len(classes)}."
            )
        if (
            stage != "fit"
        ):  # a fit may begin anew on other classes; one that goes on is checked as its checkpoint is loaded
            self._check_classes(self.classes)

    def on_train_start(self) -> None:
        """Take over the data's classes."""
        self.classes = self._data_classes()

    def _data_classes(self) -> list[str] | None:
        found = getattr(getattr(self._trainer, "datamodule", None), "classes", None)
        return None if found is None or self.task not in ("classification", "ordinal") else [str(x) for x in found]

    def _check_classes(self, trained: list[str] | None) -> None:
        found = self._data_classes()
        if trained is not None and found is not None and found != trained:
            raise ValueError(
                f"the model was trained on the classes {trained}, in this order, but the data's are {found}: its scores "
                f"would be of other classes. Set data.classes to {trained}, or train a new model on the data's own."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """DilatedModule's, and the names of the classes."""
        super().on_save_checkpoint(checkpoint)
        if self.classes is not None:
            checkpoint["classes"] = self.classes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """DilatedModule's; see that the data's classes are those of the checkpoint."""
        super().on_load_checkpoint(checkpoint)
        if checkpoint.get("classes") is not None:
            self._check_classes(checkpoint["classes"])
            self.classes = checkpoint["classes"]

    def configure_model(self) -> None:
        """Build the layers, once, and freeze what is not trained."""
        fresh = not self._built
        super().configure_model()
        if fresh and self.lora_rank is not None:
            add_lora(self.transformer, self.lora_rank, self.lora_alpha)
            self.transformer.train(self.training)
        if fresh and (self.freeze_encoder or self.lora_rank is not None):
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.startswith("head.") or ".lora_" in name)

    def merge_lora(self) -> None:
        """Add the low-rank updates to the weights, which then are those of a model without `lora_rank`."""
        if self.lora_rank is not None:
            merge_lora(self.transformer)
            self.lora_rank = self.hparams["lora_rank"] = None

    def train(self, mode: bool = True) -> PooledModule:
        """nn.Module's; a frozen encoder stays in eval mode."""
        super().train(mode)
        if self.freeze_encoder:
            for name, child in self.named_children():
                if name != "head":
                    child.eval()
        return self

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _outcome(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(logits (B, C), checked labels)."""
        if self.task is None:
            raise ValueError(
                f"this {type(self).__name__} makes embeddings only: give task and num_classes to train it."
            )
        if "label" not in batch:
            raise ValueError(f"the batch holds {list(batch)}, but no label to train with or to compare with.")
        self.configure_model()
        label = guarded(self._checked, batch["label"])
        return self.head(self.embed(batch)), send(label, self.head.linear.weight.device)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """DilatedModule's; labels are read before, since the host would wait for what the GPU is doing."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        if self.head is not None and isinstance(batch, Mapping) and "label" in batch:
            try:
                found = self.head.check(torch.as_tensor(batch["label"]))
            except (TypeError, ValueError) as error:  # raised in the step, where all ranks hear of it
                found = error
            label = moved["label"]
            tells = isinstance(label, Tensor) and not label.is_inference()  # whether it is written to later
            self._read = (label, label._version, found) if tells else (None, 0, None)
        return moved

    def _checked(self, label: Any) -> Tensor:
        """Labels as the head takes them."""
        moved, version, found = self._read
        if moved is None or label is not moved or label._version != version:
            return self.head.check(torch.as_tensor(label))
        if isinstance(found, Exception):
            raise found
        return found

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """(sum of the samples' losses, number of samples), alike on all ranks of the sequence."""
        logits, label = self._outcome(batch)
        return self.head.losses(logits, label).sum(), len(label)

    def _evaluate(self, stage: str, batch: Any) -> None:
        logits, label = self._outcome(batch)
        self.mean_loss[stage].update(self.head.losses(logits, label).sum(), len(label))
        group = active_sequence()
        count = len(label) if group is None or group.rank == 0 else 0  # each sample once
        self.epoch_scores[stage].update(self.head.scores(logits)[:count], label[:count])

    def _report(self, stage: str) -> None:
        super()._report(stage)
        metric = self.epoch_scores[stage]
        found = metric.whole_epoch()  # of all ranks, gathered by torchmetrics
        metric.reset()
        for name, value in self.head.metrics(*found).items():
            self._log_of_all(f"{stage}_{name}", value.float(), prog_bar=stage == "val")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Any]:
        """The head's predictions, each (B,), or without a task `embedding` (B, E); after the batch's `index`, `slide_id` and
        `label`, where it has them, so that a row says whose it is. `prediction_class` is the predicted class by its name, if
        the training data named its classes; a label that the Trainer's precision rounded is left out."""
        self.configure_model()
        embedding = self.embed(batch)
        known = {name: batch[name] for name in ("index", "slide_id", "label") if name in batch}
        if self.head is None:
            return {**known, "embedding": embedding}
        if getattr(known.get("label"), "dtype", None) in (torch.bfloat16, torch.float16):
            del known["label"]
        found = self.head.predictions(self.head(embedding))
        if self.classes is not None:
            known["prediction"] = found["prediction"]
            known["prediction_class"] = [self.classes[i] for i in found["prediction"].tolist()]
        return {**known, **found}

    # -- fine-tuning ---------------------------------------------------------------------------------------------------
    def layer_of(self, name: str) -> int:
        """The layer that a parameter belongs to: 0 below the blocks, i + 1 in block i, depth + 1 above."""
        block = re.search(r"\bblocks\.(\d+)\.", name)
        return int(block[1]) + 1 if block else 0 if name.startswith(self.input_layers) else self.depth + 1

    def parameter_groups(self) -> list[dict[str, Any]]:
        """DilatedModule's; with `layer_decay` two groups a layer, whose `lr_scale` multiplies the learning rate."""
        if self.layer_decay == 1:
            return super().parameter_groups()
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for name, p in self.named_parameters():
            if p.requires_grad:
                layer, decays = self.layer_of(name), p.ndim >= 2
                made = {"params": [], "lr_scale": self.layer_decay ** (self.depth + 1 - layer)}
                found = groups.setdefault((layer, decays), made if decays else {**made, "weight_decay": 0.0})
                found["params"].append(p)
        return [groups[key] for key in sorted(groups)]


def guarded(check: Any, *arguments: Any) -> Any:
    """check(*arguments); where it raises on one rank of a sequence, all raise."""
    group = active_sequence()
    return check(*arguments) if group is None else group.guard(check, *arguments)


def first_token(x: Tensor, positions: Tensor) -> Tensor:
    """(B, E), on every rank, of x (B, L, E): the token at global position 0. `positions` (L,) are global."""
    holds = bool((positions[:1] == 0).any())  # no layout has it elsewhere than in front
    return sequence_sum(x[:, : int(holds)].sum(1))  # a sum over nothing is 0, and is part of the graph


def mean_token(x: Tensor, positions: Tensor, lengths: Tensor | None, start: int = 0) -> Tensor:
    """(B, E), on every rank, of x (B, L, E): the mean over each sample's tokens from position `start` on."""
    counted = (positions >= start).expand(x.shape[:2])
    if lengths is not None:
        counted = counted & (positions < torch.as_tensor(lengths).cpu()[:, None])
    return sequence_mean(x, mask=send(counted, x.device))


def check_lengths(lengths: Any, rows: int, least: int, what: str) -> Tensor | None:
    """(B,) int64 lengths on the CPU; raises ValueError for one below `least`, or (where `rows` >= 0) above `rows`."""
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.is_floating_point() or lengths.ndim != 1:
        raise TypeError(f"lengths must be integers (B,), got {lengths.dtype} of shape {tuple(lengths.shape)}.")
    for i, n in enumerate(lengths.tolist()):
        if n < least or 0 <= rows < n:
            limit = f" to {rows}" if rows >= 0 else " at least"
            raise ValueError(f"lengths[{i}] is {n}; {what}, so it must be {least}{limit}.")
    return lengths.long()
