"""WarmupCosine against its formula in each step, and its errors."""

import math

import pytest
import torch

from lightning_dilated.models import WarmupCosine


def optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates])


def factors(steps, **options):
    """Return the learning rate of each step relative to the peak."""
    opt = optimizer(2.0)
    schedule, rates = WarmupCosine(opt, **options), []
    for _ in range(steps):
        rates.append(opt.param_groups[0]["lr"] / 2.0)
        opt.step()
        schedule.step()
    return rates


HALF = 0.5 * (1 + math.cos(math.pi / 4))
VALUES = {
    "warm-up": ({"total_steps": 100, "warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 1.0]),
    "no warm-up": ({"total_steps": 4, "final_fraction": 0}, [1, HALF, 0.5, 1 - HALF, 0, 0, 0]),
    "beyond the end": ({"total_steps": 2, "final_fraction": 0.3}, [1, 0.65, 0.3, 0.3, 0.3]),
    "both": ({"total_steps": 3, "warmup_steps": 1, "final_fraction": 0.5}, [0.5, 1, 0.75, 0.5, 0.5]),
    "constant after warm-up": ({"total_steps": 3, "warmup_steps": 1, "final_fraction": 1}, [0.5, 1, 1, 1]),
    "default floor": ({"total_steps": 1}, [1, 0.1, 0.1]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    options, want = VALUES[name]
    assert factors(len(want), **options) == pytest.approx(want)


def test_each_group_keeps_its_own_peak():
    opt = optimizer(1.0, 0.1)
    schedule = WarmupCosine(opt, total_steps=2, final_fraction=0)
    opt.step(), schedule.step()
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.5, 0.05])


def test_state_goes_on():
    first, second = optimizer(1.0), optimizer(1.0)
    a, b = (WarmupCosine(opt, total_steps=10, warmup_steps=2) for opt in (first, second))
    for _ in range(5):
        first.step(), a.step()
    second.load_state_dict(first.state_dict()), b.load_state_dict(a.state_dict())
    for opt, schedule in ((first, a), (second, b)):
        opt.step(), schedule.step()
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] < 1


REFUSED = {
    "no steps": ({"total_steps": 0}, ValueError, "total_steps must be at least 1, got 0"),
    "steps a float": ({"total_steps": 1.5}, TypeError, "total_steps must be an integer, got 1.5"),
    "negative warm-up": ({"total_steps": 5, "warmup_steps": -1}, ValueError, "warmup_steps must be at least 0"),
    "all warm-up": ({"total_steps": 5, "warmup_steps": 5}, ValueError, "warmup_steps=5 must be below total_steps=5"),
    "floor above 1": ({"total_steps": 5, "final_fraction": 1.1}, ValueError, r"final_fraction .* \[0, 1\], got 1.1"),
    "floor below 0": ({"total_steps": 5, "final_fraction": -0.1}, ValueError, "final_fraction"),
    "floor nan": ({"total_steps": 5, "final_fraction": math.nan}, ValueError, "final_fraction"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        WarmupCosine(optimizer(1.0), **options)


def test_a_run_without_total_steps_lends_its_own():
    schedule = WarmupCosine(optimizer(1.0), warmup_steps=2, final_fraction=0)
    assert [schedule.factor(s) for s in (0, 2, 50)] == [1 / 3, 1, 1]  # the number of steps is not known yet
    schedule.end_at(4)
    assert [schedule.factor(s) for s in (2, 3, 4, 9)] == pytest.approx([1, 0.5, 0, 0])
    schedule.end_at(1)  # a trial run that is shorter than the warm-up
    assert schedule.factor(0) == 1 / 3
    with pytest.raises(ValueError, match="needs total_steps, because the Trainer has no max_steps"):
        schedule.end_at(-1)
