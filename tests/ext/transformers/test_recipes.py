"""Each HFCausalLM recipe runs at a tiny size on a CPU, without a network and with random weights."""

import csv
import json

import pytest
import yaml

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
pytest.importorskip("peft", reason="needs the extra lora")
from ...cli.conftest import run_in
from ...cli.test_recipes import OF_TRANSFORMERS
from ..text.chats import CHATML, chats, write
from ..text.test_row_streams import texts
from .decoders import config
from .test_chat_transformers import V, hf_folder

HFCausalLM = ld.integrations.transformers.HFCausalLM
LLAMA = {
    "model_type": "llama", "vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODEL = ["--model.model", json.dumps(LLAMA)]
TINY_RUNS = {
    "sft_long": ["--data.paths", "chats.jsonl", "--data.seq_len", "256", "--data.cache_dir", "cache"],
    "extend_context": [
        *(
            "--data.paths",
            "texts.jsonl",
            "--data.val_paths",
            "texts.jsonl",
            "--data.seq_len",
            "64",
            "--data.readers",
            "2",
        ),
        *("--data.epoch_rows", "8", "--data.val_limit", "2", "--data.cache_dir", "cache"),
    ],
}
TRAINER = [
    *("--trainer.max_steps", "2", "--trainer.accumulate_grad_batches", "1", "--trainer.val_check_interval", "2"),
    *("--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"),
]


@pytest.fixture
def folder(tmp_path):
    """A folder with data, and with base-model, which contains a model and its tokenizer."""
    write(tmp_path / "chats.jsonl", chats(40))
    write(tmp_path / "texts.jsonl", texts(40))
    HFCausalLM(config("llama", vocab_size=V, num_hidden_layers=4)).save_pretrained(tmp_path / "base-model")
    hf_folder(tmp_path / "base-model", CHATML)
    return tmp_path


def test_every_recipe_has_a_tiny_run():
    assert set(TINY_RUNS) == {path.stem for path in OF_TRANSFORMERS}


@pytest.mark.parametrize("weights", ["random", "base-model"])
@pytest.mark.parametrize("name", TINY_RUNS)
def test_runs_tiny(folder, name, weights):
    """Train two steps and validate, with random weights or the weights in a folder, then load the checkpoint."""
    model = MODEL if weights == "random" else []
    run_in(folder, "fit", "--config", f"{name}.yaml", *TINY_RUNS[name], *model, *TRAINER).ok()
    (table,) = (folder / "runs" / name).rglob("metrics.csv")
    rows = list(csv.DictReader(table.open()))
    losses = {key: [float(r[key]) for r in rows if r.get(key)] for key in ("train_loss", "val_loss")}
    assert (
        len(losses["train_loss"]) == 2
        and len(losses["val_loss"]) == 1
        and all(0 < x < 10 for y in losses.values() for x in y)
    )
    (ckpt,) = (folder / "runs" / name).rglob("last.ckpt")
    loaded = HFCausalLM.load_from_checkpoint(ckpt)
    assert loaded.tokenizer_files["chat_template.jinja"] == CHATML
    if name == "extend_context":
        assert len(set(loaded.patterns)) > 1
        assert loaded.config.rope_parameters["rope_type"] == "yarn" and loaded.config.max_position_embeddings == 131072


@pytest.mark.parametrize("recipe", OF_TRANSFORMERS, ids=lambda path: path.stem)
def test_says_how_to_run_it(folder, recipe):
    text = recipe.read_text()
    assert f"lightning-dilated fit --config recipes/{recipe.name}" in text
    config = yaml.safe_load(text)
    assert config["trainer"]["max_steps"] > config["model"]["init_args"]["lr_scheduler"]["init_args"]["warmup_steps"]
    run_in(folder, "fit", "--config", recipe.name, "--print_config").ok()


def test_a_printed_config_has_the_values_of_a_mapping(folder):
    """`plan` reads the file itself, so the printed config must contain the values of the mapping."""
    result = run_in(folder, "fit", "--config", "sft_long.yaml", *MODEL, "--print_config").ok()
    printed = yaml.safe_load(result.out)["model"]["init_args"]["model"]
    assert isinstance(printed, dict) and printed["model_type"]
