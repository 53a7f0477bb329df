"""Checkpoints and exported folders contain the tokenizer of the data, and `generate` reads it."""

import json

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.data import TokenDataModule
from lightning_dilated.data.tokenizer_files import checked_files, read_files, write_files
from lightning_dilated.ext.decoding.load import stored_tokenizer

from ..ext.text.chats import CHATML, TAGGED, chats, tokenizer_json, write
from .conftest import run_in

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.full
CKPT = "model.ckpt"
SMALL = '{"segment_lengths": [16, 64], "dilation_rates": [1, 4]}'
CONFIG = f"""
seed_everything: 0
trainer:
  accelerator: cpu
  max_steps: 2
  val_check_interval: 1
  limit_val_batches: 1
  logger: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: ., filename: model, enable_version_counter: false}}
model:
  class_path: lightning_dilated.LongNetLM
  init_args: {{pattern: {SMALL}, dim: 16, depth: 1, num_heads: 4, vocab_size: 325}}
data:
  class_path: lightning_dilated.data.ChatDataModule
  init_args:
    {{paths: chats.jsonl, tokenizer: tokenizer.json, template: chatml.jinja, seq_len: 300, cache_dir: cache,
     val_fraction: 0.2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model that was trained on conversations."""
    path = tmp_path_factory.mktemp("chat")
    write(path / "chats.jsonl", chats(20))
    tokenizer_json(path)
    (path / "chatml.jinja").write_text(CHATML)
    (path / "chat.yaml").write_text(CONFIG)
    run_in(path, "fit", "--config", "chat.yaml").ok()
    (path / "tokenizer.json").rename(path / "away.json")
    return path


def generated(folder, *options):
    result = run_in(folder, "generate", "--ckpt_path", *options, "--prompt", "the cat", "--max_new_tokens", "9").ok()
    return result.out


def test_generate_needs_no_tokenizer(folder):
    with_one = generated(folder, CKPT, "--tokenizer", "away.json")
    assert generated(folder, CKPT) == with_one != "the cat\n"
    stored = torch.load(folder / CKPT, weights_only=True)["tokenizer"]
    assert set(stored) == {"tokenizer.json", "chat_template.jinja"} and stored["chat_template.jinja"] == CHATML


def test_folders_hold_it(folder):
    model = LongNetLM.load_from_checkpoint(folder / CKPT)
    model.save_pretrained(folder / "saved")
    assert (folder / "saved" / "chat_template.jinja").read_text() == CHATML
    assert LongNetLM.from_pretrained(folder / "saved").tokenizer_files == model.tokenizer_files
    assert generated(folder, "saved") == generated(folder, CKPT)
    run_in(folder, "consolidate", CKPT, "--out", "whole").ok()
    assert generated(folder, "whole") == generated(folder, CKPT)


def test_sharded_checkpoints_hold_it(folder):
    name = "lightning_dilated.callbacks.ShardedCheckpoint"
    callback = json.dumps([{"class_path": name, "init_args": {"folder": "sharded"}}])
    run_in(
        folder, "fit", "--config", "chat.yaml", "--data.tokenizer", "away.json", "--trainer.callbacks", callback
    ).ok()
    run_in(folder, "consolidate", "sharded", "--out", "from_shards").ok()
    assert generated(folder, "from_shards") == generated(folder, CKPT)


def test_another_tokenizer_is_reported(folder, recwarn):
    (folder / "tokenizer.json").write_text((folder / "away.json").read_text().replace("<|endoftext|>", "<|other|>"))
    result = run_in(folder, "validate", "--config", "chat.yaml", "--ckpt_path", CKPT)
    (folder / "tokenizer.json").unlink()
    assert result.code == 0, result.err[-2000:]
    assert any("trained with another tokenizer" in str(x.message) for x in recwarn)


def test_the_template_may_change(folder, recwarn):
    (folder / "tagged.jinja").write_text(TAGGED)
    run_in(
        folder, "validate", "--config", "chat.yaml", "--ckpt_path", CKPT, "--data.tokenizer", "away.json",
        "--data.template", "tagged.jinja",
    ).ok()  # fmt: skip
    assert not any("another tokenizer" in str(x.message) for x in recwarn)


def test_a_small_model_is_one_line(folder):
    result = run_in(
        folder, "fit", "--config", "chat.yaml", "--data.tokenizer", "away.json", "--model.vocab_size", "300"
    )
    assert result.code != 0 and "vocab_size=300 is below the data's 325 tokens" in result.err
    assert "Traceback" not in result.err


def test_token_files_name_theirs(tmp_path):
    import numpy as np

    np.save(tmp_path / "x.npy", np.arange(300, dtype=np.uint16))
    options = {"seq_len": 16, "tokenizer": tokenizer_json(tmp_path)}
    data = TokenDataModule(str(tmp_path / "x.npy"), vocab_size=325, **options)
    assert set(data.tokenizer_files()) == {"tokenizer.json"}
    with pytest.raises(ValueError, match=r"has 325 tokens, more than data\.vocab_size = 310"):
        TokenDataModule(str(tmp_path / "x.npy"), vocab_size=310, **options).check()
    assert TokenDataModule(str(tmp_path / "x.npy"), 16, 310).tokenizer_files() is None


WRONG = {
    "another type": "text",
    "no tokenizer.json": {"chat_template.jinja": "x"},
    "a path out of the folder": {"tokenizer.json": "{}", "../evil.json": "x"},
    "an absolute path": {"tokenizer.json": "{}", "/tmp/evil.json": "x"},
    "a program": {"tokenizer.json": "{}", "tokenizer.py": "x"},
    "a model": {"tokenizer.json": "{}", "config.json": "x"},
    "no text": {"tokenizer.json": 7},
}


@pytest.mark.parametrize("name", WRONG)
def test_only_files_of_a_tokenizer(tmp_path, name):
    with pytest.raises(ValueError, match="the checkpoint holds a tokenizer"):
        checked_files(WRONG[name], "the checkpoint")
    model = LongNetLM(DilatedPattern.dense(), dim=16, depth=1)
    checkpoint = {"state_dict": model.state_dict(), "tokenizer": WRONG[name]}
    with pytest.raises(ValueError, match="the checkpoint holds a tokenizer"):
        model.on_load_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="holds a tokenizer"):
        stored_tokenizer(tmp_path / "x.ckpt")


def test_files_come_back(tmp_path):
    files = {"tokenizer.json": "{}", "chat_template.jinja": "x", "additional_chat_templates/tool.jinja": "y"}
    write_files(tmp_path, files)
    (tmp_path / "other.json").write_text(json.dumps(1))
    assert read_files(tmp_path) == checked_files(files, "x") == files
    assert read_files(tmp_path / "additional_chat_templates") is None
