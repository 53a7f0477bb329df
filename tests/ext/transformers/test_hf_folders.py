"""HFCausalLM: tokens, typos in folders, consolidated checkpoints, and export to a transformers folder."""

import time

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.cli.load_model import load_any
from lightning_dilated.data import ChatDataModule
from lightning_dilated.ext.export import command as export
from lightning_dilated.ext.export import consolidate
from lightning_dilated.models.pretrained import plain_arguments

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
pytest.importorskip("safetensors", reason="needs the extra hub")
import transformers

from ...models import trainer
from ..text.chats import CHATML, chats, write
from .decoders import V, config, tokens

HFCausalLM = ld.integrations.transformers.HFCausalLM
N = 24


# -- forward -------------------------------------------------------------------------------------------------------------
def test_forward_takes_tokens():
    model, x = HFCausalLM(config("llama")).eval(), tokens(2, N)
    lengths, bounds = torch.tensor([N, 9]), torch.tensor([0, 5, N], dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(model(x), model({"tokens": x}))
        assert torch.equal(model(x, lengths=lengths), model({"tokens": x, "lengths": lengths}))
        packed = model(x[:1], cu_seqlens=bounds)
        assert torch.equal(packed, model({"tokens": x[:1], "cu_seqlens": bounds}))
        torch.testing.assert_close(packed[:, 5:], model(x[:1, 5:]), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="lengths must be entries of the batch"):
        model({"tokens": x}, lengths=lengths)
    with pytest.raises(TypeError, match="a batch is a mapping of tokens"):
        model([1, 2, 3])


# -- folders that are not there ------------------------------------------------------------------------------------------
def test_a_typo_in_a_folder_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "file").touch()
    start = time.monotonic()
    for name in (
        "runs/modle",
        "./modle",
        "../modle",
        "~/modle",
        "runs/a/b",
        "a/b/c",
        "modle/",
        "my model",
        tmp_path / "x",
    ):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            HFCausalLM(name)
    with pytest.raises(FileNotFoundError, match=r"runs/empty' is a folder without config.json"):
        HFCausalLM("runs/empty")
    with pytest.raises(NotADirectoryError, match="'file' is a file"):
        HFCausalLM("file")
    assert time.monotonic() - start < 5


def test_a_name_that_may_be_a_repository_is_said_before_the_hub_is_asked(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)

    def unreachable(*args, **options):
        assert "model='modle': no such folder here" in caplog.text
        raise OSError("the hub cannot be reached\nand more")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with (
        caplog.at_level("INFO"),
        pytest.raises(FileNotFoundError, match=r"no such folder, .*\(the hub cannot be reached\)"),
    ):
        HFCausalLM("modle")


# -- checkpoints ---------------------------------------------------------------------------------------------------------
def checkpoint(model, path, data=None):
    """Return the checkpoint of a run with one step."""
    rows = [{"tokens": x[:-1], "labels": x[1:]} for x in tokens(2, N + 1)]
    built = trainer(max_steps=1, limit_val_batches=0)
    built.fit(model, torch.utils.data.DataLoader(rows) if data is None else data)
    built.save_checkpoint(path)
    return str(path)


KINDS = {
    "llama": (config("llama"), {}),
    "tied": (config("llama", tie_word_embeddings=True), {}),
    "labels": (config("qwen3", id2label={0: "a", 5: "b"}, label2id={"a": 0, "b": 5}), {}),
    "pattern": (config("gemma3"), {"pattern": {"hybrid": {"local": 8, "global_every": 2}}}),
    "lora": (config("llama"), {"lora": {"r": 2, "target_modules": ["q_proj"]}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_consolidate_takes_every_decoder(tmp_path, kind):
    values, options = KINDS[kind]
    model, folder = HFCausalLM(values, **options), str(tmp_path / "out")
    path = checkpoint(model, tmp_path / "hf.ckpt")
    consolidate.run([path, "--out", folder])
    consolidate.run([path, "--out", f"{folder}.safetensors"])
    want = model.eval()(tokens(1, N))
    for again in (HFCausalLM.from_pretrained(folder), load_any(folder), ld.DilatedModule.from_pretrained(folder)):
        assert isinstance(again, HFCausalLM) and torch.equal(again.eval()(tokens(1, N)), want)
        assert again.config.id2label == model.config.id2label and again.patterns == model.patterns
    with pytest.raises(ValueError, match=r"not of transformers\. Load it by HFCausalLM.from_pretrained"):
        HFCausalLM(folder)


def test_keys_that_json_would_change_are_refused():
    """Numbers as keys are allowed in a config only, where transformers converts them back."""
    config = {"id2label": {0: "a", 5: "b"}, "pruned_heads": {1: [2]}}
    want = {"id2label": {"0": "a", "5": "b"}, "pruned_heads": {"1": [2]}}
    assert plain_arguments({"model": config}, "Model") == {"model": want}
    for names in ({1: "a", "1": "b"}, {1.5: "a"}, {None: "a"}, {True: "a"}):
        for config in (names, {"id2label": names}):
            with pytest.raises(TypeError, match=r"model=.* cannot be written"):
                plain_arguments({"model": config}, "Model")


@pytest.mark.parametrize("kind", KINDS)
def test_export_writes_a_plain_folder(tmp_path, kind, capsys):
    values, options = KINDS[kind]
    model, folder = HFCausalLM(values, **options), str(tmp_path / "plain")
    export.run(["--ckpt_path", checkpoint(model, tmp_path / "hf.ckpt"), "--out", folder])
    assert "a folder of transformers" in capsys.readouterr().out
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ring_dilated").eval()
    torch.testing.assert_close(plain(tokens(1, N)).logits, model.eval()(tokens(1, N)), rtol=0, atol=1e-5)


def test_other_models_have_no_plain_folder(tmp_path):
    model = ld.LongNetLM(ld.DilatedPattern.dense(), vocab_size=V, dim=16, depth=1, num_heads=2)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"\.onnx"):
        export.run(["--ckpt_path", str(tmp_path / "model"), "--out", str(tmp_path / "plain"), "--max_len", "16"])


def test_an_exported_folder_keeps_the_tokenizer(tmp_path):
    from .test_chat_transformers import hf_folder

    tokenizer = hf_folder(tmp_path / "tokenizer", CHATML)
    rows = write(tmp_path / "chats.jsonl", chats(6))
    data = ChatDataModule(rows, tokenizer, 300, val_fraction=0, test_fraction=0, cache_dir=str(tmp_path / "cache"))
    path = checkpoint(HFCausalLM(config("llama", vocab_size=330)), tmp_path / "hf.ckpt", data)
    export.run(["--ckpt_path", path, "--out", str(tmp_path / "plain")])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert theirs("the cat sat").input_ids == data.tokenizer.encode("the cat sat")
