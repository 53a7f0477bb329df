"""HFCausalLM stores the tokenizer of its data in checkpoints and in folders, where transformers reads it."""

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.data import ChatDataModule, TextStreamDataModule
from lightning_dilated.ext.decoding.command import run as generate_command
from lightning_dilated.ext.decoding.load import stored_tokenizer

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
import transformers

from ...strategy.runs import trainer
from ..text.chats import CHATML, chat, chats, write
from .decoders import config
from .test_chat_transformers import V, hf_folder

HFCausalLM = ld.integrations.transformers.HFCausalLM


@pytest.fixture
def trained(tmp_path):
    """Return a function: `trained(**options of the model)` returns a model after two steps on conversations."""
    folder = hf_folder(tmp_path / "tokenizer", CHATML)
    paths = write(tmp_path / "chats.jsonl", chats(12))

    def make(model=None, **options):
        data = ChatDataModule(paths, folder, 400, val_fraction=0, test_fraction=0, cache_dir=str(tmp_path / "cache"))
        net = HFCausalLM(model or config("llama", vocab_size=V), **options)
        built = trainer("auto", 1, max_steps=2)
        built.fit(net, data)
        built.save_checkpoint(tmp_path / "run.ckpt")
        return net

    return make


def same(folder):
    """Return whether the tokenizer in a folder is the tokenizer of the training."""
    own, messages = transformers.AutoTokenizer.from_pretrained(folder), chat("the cat", "sat")["messages"]
    text = own.apply_chat_template(messages, tokenize=False)
    return own.chat_template == CHATML and own.eos_token == "<|im_end|>" and own.decode(own(text)["input_ids"]) == text


def test_checkpoints_and_folders(tmp_path, trained):
    trained().save_pretrained(tmp_path / "direct")
    assert same(tmp_path / "direct")
    stored = torch.load(tmp_path / "run.ckpt", weights_only=True)["tokenizer"]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(stored)
    loaded = HFCausalLM.load_from_checkpoint(tmp_path / "run.ckpt")
    loaded.save_pretrained(tmp_path / "later")
    assert same(tmp_path / "later") and loaded.tokenizer_files == stored
    assert (
        stored_tokenizer(tmp_path / "run.ckpt").encode("the cat").ids
        == stored_tokenizer(tmp_path / "later").encode("the cat").ids
    )
    # a model from a folder keeps the folder's tokenizer, even if the data have a different one
    again = HFCausalLM(str(tmp_path / "later"))
    again.save_pretrained(tmp_path / "again")
    assert same(tmp_path / "again")
    options = {"val_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path / "cache")}
    ChatDataModule(str(tmp_path / "chats.jsonl"), str(tmp_path / "later"), 400, **options).check()
    assert len([x for x in (tmp_path / "cache").iterdir() if x.is_dir()]) == 1  # equal tokens, so not encoded again


def test_adapters(tmp_path, trained):
    pytest.importorskip("peft")
    HFCausalLM(config("llama", vocab_size=V)).save_pretrained(tmp_path / "base")
    model = trained(str(tmp_path / "base"), lora={"r": 2, "target_modules": ["q_proj"]})
    model.save_pretrained(tmp_path / "adapters")
    model.save_pretrained(tmp_path / "merged", merge=True)
    assert same(tmp_path / "adapters") and same(tmp_path / "merged")


def test_a_model_with_fewer_tokens(tmp_path):
    folder, paths = hf_folder(tmp_path / "tokenizer", CHATML), write(tmp_path / "chats.jsonl", chats(12))
    model = HFCausalLM(config("llama", vocab_size=300))
    text = write(tmp_path / "texts.jsonl", [{"text": "the cat"}])
    options = {"val_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path / "cache")}
    for data in (
        ChatDataModule(paths, folder, 400, **options),
        TextStreamDataModule(text, folder, 8, readers=1, cache_dir=str(tmp_path / "cache")),
    ):
        with pytest.raises(ValueError, match="vocab_size=300 is below the data's 325 tokens"):
            trainer("auto", 1, max_steps=1).fit(model, data)


def test_generate_from_the_command_line(tmp_path, trained, capsys):
    """A checkpoint and a transformers folder continue a prompt with the same tokens as transformers' `generate`."""
    model = trained(pattern={"hybrid": {"local": 8, "global_every": 2}})
    model.save_pretrained(tmp_path / "plain")
    arguments = ["--prompt", "the cat", "--max_new_tokens", "12", "--temperature", "0"]
    texts = []
    for path in ("run.ckpt", "plain"):
        generate_command(["--ckpt_path", str(tmp_path / path), *arguments])
        texts.append(capsys.readouterr().out)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    ids = own("the cat", return_tensors="pt", add_special_tokens=False)["input_ids"]
    whole = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[])
    assert texts == [own.decode(whole[0]) + "\n"] * 2
