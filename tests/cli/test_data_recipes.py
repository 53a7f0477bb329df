"""The recipes that show data modules train two steps at a tiny size."""

import pytest

pytestmark = pytest.mark.full

SMALL = ["--model.depth", 1, "--model.lr_scheduler.warmup_steps", 1, "--trainer.max_steps", 2]
SMALL += ["--trainer.val_check_interval", 2, "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]
RECIPES = {
    "bytes_context": [
        *("--data.paths", "text.txt", "--data.seq_len", 128, "--data.val_limit", 1, "--model.dim", 32),
        *("--model.pattern", '{"hybrid": {"local": 32, "global_every": 1}}'),
    ],
    "far_recall": ["--data.val_size", 32, "--model.dim", 16],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(cli, name):
    result = cli("fit", "--config", f"recipes/{name}.yaml", *RECIPES[name], *SMALL).ok()
    folder = result.folder / "runs" / name / "version_0"
    assert list(folder.rglob("last.ckpt")) and "val_loss" in (folder / "metrics.csv").read_text()


def test_the_control_of_far_recall(cli):
    pattern = '{"segment_lengths": [16, 64], "dilation_rates": [1, 4]}'
    cli(
        "fit",
        "--config",
        "far_recall.yaml",
        "--model.kv_conv",
        "null",
        "--model.pattern",
        pattern,
        *RECIPES["far_recall"],
        *SMALL,
    ).ok()
