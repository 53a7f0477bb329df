"""Every file that `fit` writes can be read by the command line and by `load_from_checkpoint`."""

import pytest
import torch

import lightning_dilated as ld

from .conftest import DATA, TINY

pytestmark = pytest.mark.full


class Doubles(ld.LongNetLM):
    """A user's subclass with two more arguments; the program imports it by its path."""

    def __init__(self, *args, scale: float = 2.0, rows: list[int] | None = None, **options) -> None:
        super().__init__(*args, **options)
        self.scale, self.rows = scale, rows


GATED = '{"kind": "gated_delta", "conv": 2, "gate_init": 0.5}'
CASES = {
    "a recurrence": ["--model.recurrence", GATED],
    "a recurrence of one layer": ["--model.recurrence", f"[null, {GATED}]", "--model.num_kv_heads", "2"],
    "a recurrence of segments": ["--model.recurrence", '{"kind": "delta", "segment": 16}'],
    "hashed heads": ["--model.hashed.layers", "[1]", "--model.hashed.groups", "2", "--model.hashed.soft_until", "48"],
    "hashed heads of a class": ["--model.hashed", "lightning_dilated.Hashed", "--model.hashed.heads", "2"],
    "patterns of layers": [
        *("--model.pattern", '[{"branches": [[16, 1], [64, 4]]}, {"branches": [[16, 1], {"width": 8}]}]'),
        *("--model.rotary_base", "[10000.0, 500.0]"),
    ],
    "an optimizer": [
        *("--model.optimizer", "SGD", "--model.optimizer.momentum", "0.5"),
        *("--model.lr_scheduler", "torch.optim.lr_scheduler.StepLR", "--model.lr_scheduler.step_size", "2"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_a_fit_is_read_again(cli, name):
    fitted = cli("fit", *TINY, *CASES[name]).ok()
    (last,) = fitted.folder.glob("runs/quickstart/version_*/checkpoints/last.ckpt")
    stored = torch.load(last, weights_only=True)
    model = ld.LongNetLM.load_from_checkpoint(last)
    tensors = model.state_dict()
    assert tensors.keys() == stored["state_dict"].keys()
    assert all(torch.equal(x, stored["state_dict"][key]) for key, x in tensors.items())
    again = ld.LongNetLM.from_pretrained(model.save_pretrained(fitted.folder / "folder"))
    tokens = torch.arange(48).reshape(1, 48)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens), again.eval()(tokens))
    cli("validate", *DATA, "--ckpt_path", last).ok()
    cli("fit", *TINY, *CASES[name], "--trainer.max_steps", "4", "--ckpt_path", last).ok()


def test_a_subclass_of_the_users_own_is_read_again(cli):
    path = f"{__name__}.Doubles"
    fitted = cli(
        "fit", *TINY, "--model", path, "--model.scale", "3", "--model.rows", "[1, 2]", "--model.pattern", GLOBAL
    ).ok()
    (last,) = fitted.folder.glob("runs/quickstart/version_*/checkpoints/last.ckpt")
    for model in (Doubles.load_from_checkpoint(last), ld.LongNetLM.load_from_checkpoint(last)):
        assert type(model) is Doubles and (model.scale, model.rows) == (3.0, [1, 2])
    cli("validate", *DATA, "--ckpt_path", last).ok()


GLOBAL = '{"branches": [[16, 1], [64, 4]]}'
