"""Survival: heads for times to an event (discrete-time hazards, Cox's partial likelihood), and Harrell's concordance.

A label is (time, event). `event` is 1 if the event happened at `time`, and 0 if it had not happened by then (censored).

Shape letters: B batch, E embedding dim, K bins of time, S samples of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.ext.pooled.heads import Head

LOSSES = ("discrete", "cox")
#: number of time bins if num_classes is None
BINS = 4
#: number of rows of a chunk when every sample is compared with every other
ROWS = 1024


class SurvivalHead(Head):
    """Base of the heads for times to an event; labels (B, 2) hold times and events."""

    name = "survival"
    columns, label_columns = 1, 2

    def check(self, label: Tensor) -> Tensor:
        """Return the labels (B, 2); raise TypeError or ValueError for other shapes and values."""
        if label.dtype in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"the times are rounded to {label.dtype}: Trainer(precision='bf16-true' or '16-true') casts the numbers "
                "of a batch. Train with precision='bf16-mixed'."
            )
        if label.ndim != 2 or label.shape[1] != 2:
            raise ValueError(
                f"labels of survival must be (B, 2), time and event, got {tuple(label.shape)}: SlideDataModule gives them "
                "with data.labels 'survival'."
            )
        time, event = label.unbind(1)
        if not bool((time.isfinite() & (time >= 0)).all()) or not bool(((event == 0) | (event == 1)).all()):
            raise ValueError("labels of survival must be finite times of at least 0, and events of 0 or 1.")
        return label

    def metrics(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Harrell's concordance of risks (S, 1) and labels (S, 2)."""
        return {"concordance": concordance_index(scores[:, 0], *labels.unbind(1))}


class HazardHead(SurvivalHead):
    """Discrete-time survival: K logits of hazards. h_k is the probability of the event in bin k, if it was not earlier.

    Gensheimer & Narasimhan 2019, doi 10.7717/peerj.6257. Bin k contains the times from edge k - 1 to below edge k; the
    last bin has no upper edge. A sample with an event in bin k has the loss -log h_k - sum over j < k of log(1 - h_j).
    A sample that is censored in bin k has only the sum. The loss is a sum over samples, so it is exact for any batch
    and on any number of ranks.

    Args:
        dim: E.
        bins: K.
        edges: K - 1 increasing times; None until they are known.
    """

    def __init__(self, dim: int, bins: int, edges: Sequence[float] | None = None) -> None:
        super().__init__()
        self.classes = integer(bins, "num_classes", 2)
        self.linear, self.edges = nn.Linear(dim, bins), None if edges is None else list(edges)

    def check(self, label: Tensor) -> Tensor:
        """Return the checked labels (B, 2); raise ValueError if the edges of the bins are unknown."""
        if self.edges is None:
            raise ValueError(
                "the bins of time are not known: fit takes them from SlideDataModule's training slides, and checkpoints "
                "store them. With other data, set time_bins to the edges of the bins."
            )
        return super().check(label)

    def bins(self, time: Tensor) -> Tensor:
        """Return the bin of each time, (B,) int64."""
        edges = send(torch.tensor(self.edges, dtype=torch.float64), time.device)
        return torch.bucketize(time.double(), edges, right=True)

    def losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """The losses in nats, (B,)."""
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        bin_of = self.bins(label[:, 0])[:, None]
        before = torch.arange(self.classes, device=z.device) < bin_of
        survived = torch.where(before, nn.functional.logsigmoid(-z), 0.0).sum(1)
        return -survived - label[:, 1].to(z) * nn.functional.logsigmoid(z).gather(1, bin_of)[:, 0]

    def survival(self, logits: Tensor) -> Tensor:
        """Return the probability that the event did not happen by the end of each bin, (B, K) fp64."""
        return nn.functional.logsigmoid(-logits.double()).cumsum(1).exp()

    def scores(self, logits: Tensor) -> Tensor:
        """Return risks (B, 1) fp64: the negative expected number of survived bins."""
        return -self.survival(logits).sum(1, keepdim=True)

    def predictions(self, logits: Tensor) -> dict[str, Tensor]:
        """Return "risk" and, for each edge, the probability of survival "survival_at_<edge>", each (B,)."""
        survival, edges = self.survival(logits), self.edges or range(1, self.classes)
        return {"risk": self.scores(logits)[:, 0]} | {f"survival_at_{t:g}": survival[:, k] for k, t in enumerate(edges)}


class CoxHead(SurvivalHead):
    """Proportional hazards: a log-risk without bias, with Cox's partial likelihood, and Efron's rule for tied times.

    The loss compares a sample that had the event with all samples at risk at that time. In training, only samples of
    this process's batch are compared, so the loss is an estimate of the likelihood, which is better for larger batches.
    In validation and test, all samples of the epoch on all ranks are compared, so the loss is exact.

    Args:
        dim: E.
    """

    of_epoch = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.classes, self.linear = 1, nn.Linear(dim, 1, bias=False)

    def losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """The losses in nats, (B,); 0 without an event."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return cox_losses(logits[:, 0].to(wide), label[:, 0], label[:, 1])

    def count(self, label: Tensor) -> Tensor:
        """The number of events, the divisor of the sum of losses."""
        return label[:, 1].sum()

    def scores(self, logits: Tensor) -> Tensor:
        """Log-risks (B, 1) fp64."""
        return logits.double()

    def predictions(self, logits: Tensor) -> dict[str, Tensor]:
        """Return "risk" (B,), the log-risk relative to the baseline."""
        return {"risk": logits[:, 0]}


def cox_losses(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Negative log partial likelihood of each sample with an event, 0 for other samples; tied events by Efron's rule.

    If d events have one time, event l = 0 .. d - 1 (in the order of the batch) is compared with all samples at risk,
    minus l / d of the d tied events. The sum of their losses is Efron's (1977, doi 10.1080/01621459.1977.10480613).

    Args:
        risk: (B,) log-risks.
        time, event: (B,).

    Returns:
        (B,) nats.
    """
    happened, out = event > 0, []
    for start in range(0, len(risk), ROWS):
        rows = slice(start, start + ROWS)
        at_risk = time[None] >= time[rows, None]
        tied = (time[None] == time[rows, None]) & happened[None]
        earlier = torch.arange(len(risk), device=risk.device)[None] < torch.arange(
            start, start + len(time[rows]), device=risk.device
        ).unsqueeze(1)
        share = happened[rows] * (tied & earlier).sum(1).to(risk) / tied.sum(1).clamp(min=1)
        top = risk[None].detach().masked_fill(~at_risk, -torch.inf).amax(1)
        weights = (risk[None] - top[:, None]).masked_fill(~at_risk, -torch.inf).exp()
        total = weights.sum(1) - share * (weights * tied).sum(1)
        # total > 0: the row itself is at risk, and at most (d - 1) / d of the d tied events are subtracted
        out.append(torch.where(happened[rows], total.log() + top - risk[rows], 0.0))
    return torch.cat(out) if out else risk


def concordance_index(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Harrell's concordance: the share of ordered pairs in which the sample with the earlier event has the higher risk.

    Equal risks count half (Harrell et al. 1982, doi 10.1001/jama.1982.03320430047030). A pair is ordered if the earlier
    time is an event. If the times are equal and only one is an event, the event counts as the earlier time.

    Args:
        risk, time, event: (S,).

    Returns:
        A number, fp64; NaN without an ordered pair, or with a risk that is not finite.
    """
    risk, time, happened = risk.double(), time.double(), event > 0
    agreeing = known = risk.new_zeros(())
    for start in range(0, len(risk), ROWS):
        rows = slice(start, start + ROWS)
        later = (time[rows, None] < time[None]) | ((time[rows, None] == time[None]) & ~happened[None])
        pairs = later & happened[rows, None]
        difference = risk[rows, None] - risk[None]
        agreeing = agreeing + ((difference > 0).double() + 0.5 * (difference == 0).double())[pairs].sum()
        known = known + pairs.sum()
    value = agreeing / known
    return value if bool(risk.isfinite().all()) else torch.full_like(value, torch.nan)


def quantile_edges(labels: Sequence[tuple[float, float]], bins: int) -> list[float]:
    """Return K - 1 edges between K bins with equal numbers of events.

    Args:
        labels: (time, event) of the training samples.
        bins: K.

    Raises:
        ValueError: if the events have too few different times.
    """
    times = np.array([time for time, event in labels if event], np.float64)
    edges = np.quantile(times, np.arange(1, bins) / bins) if len(times) else np.empty(0)
    if len(np.unique(times)) < bins or (np.diff(edges) <= 0).any() or edges[0] <= 0:
        raise ValueError(
            f"{bins} bins of time need as many groups of events that differ in time, but the training slides have "
            f"{len(times)} events at {len(np.unique(times))} times: set a smaller num_classes, or time_bins, the "
            "edges of the bins."
        )
    return edges.tolist()


def check_edges(edges: Sequence[float] | None, bins: int) -> list[float] | None:
    """Return the edges of K bins as a list. Raises TypeError or ValueError unless they are K - 1 rising times > 0."""
    if edges is None:
        return None
    values = [real(t, f"time_bins[{i}]", above=0) for i, t in enumerate(edges)]
    if len(values) != bins - 1 or any(b <= a for a, b in pairwise(values)):
        raise ValueError(
            f"time_bins must be {bins - 1} rising times, the edges between the {bins} bins of num_classes; got {values}."
        )
    return values


def survival_head(dim: int, bins: int | None, loss: str, edges: Sequence[float] | None) -> nn.Module:
    """Make the head of a survival loss. Raises TypeError or ValueError for options that contradict each other."""
    one_of(loss, "survival_loss", LOSSES)
    if loss == "cox":
        if bins is not None or edges is not None:
            raise ValueError("survival_loss='cox' has one risk and no time bins: leave num_classes and time_bins out.")
        return CoxHead(dim)
    bins = (BINS if edges is None else len(edges) + 1) if bins is None else integer(bins, "num_classes", 2)
    return HazardHead(dim, bins, check_edges(edges, bins))
