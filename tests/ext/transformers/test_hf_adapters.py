"""A model from a folder of adapters trains exactly like the model that wrote it, if both get a new optimizer."""

import json

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
pytest.importorskip("peft", reason="needs the extra lora")
import peft

from .decoders import close, config
from .test_hf_causal_lm import HYBRID, batch, one_step
from .test_hf_lora import LORA

HFCausalLM = ld.integrations.transformers.HFCausalLM
TRAINED = {**LORA, "modules_to_save": ["norm"], "lora_dropout": 0.0, "alpha_pattern": {"q_proj": 3}}


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(5)
    return HFCausalLM(config("llama")).save_pretrained(tmp_path / "base")


def trained(base, steps=2, **options):
    """Return a model that was trained for several steps with AdamW."""
    torch.manual_seed(6)
    model = HFCausalLM(base, HYBRID, lora=TRAINED, **options)
    train(model, steps)
    return model


def train(model, steps):
    """Train for several steps with a new optimizer. Return the losses."""
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        total, count = model.loss_terms(batch())
        (total / count).backward()
        optimizer.step()
        losses.append(float(total / count))
    return losses


@pytest.mark.parametrize("named", [False, True])
def test_goes_on_as_if_it_had_not_stopped(base, tmp_path, named):
    before = trained(base, config={"rms_norm_eps": 1e-3})
    before.save_pretrained(tmp_path / "adapters")
    arguments = {"model": base, "adapters": tmp_path / "adapters"} if named else {"model": tmp_path / "adapters"}
    after = HFCausalLM(**arguments, lora={"r": 2, "lora_alpha": 8} if named else None)
    assert after.patterns == before.patterns and after.config.rms_norm_eps == 1e-3
    assert torch.equal(after(batch()), before(batch()))
    trainable = [{n: tuple(p.shape) for n, p in x.named_parameters() if p.requires_grad} for x in (before, after)]
    assert trainable[0] == trainable[1] and sum(".lora_" in n for n in trainable[0]) == 2 * 2 * 3
    losses = train(before, 3)
    assert train(after, 3) == losses and losses[0] > losses[-1]
    close(dict(after.named_parameters()), {n: p.detach() for n, p in before.named_parameters()}, 0)


def test_a_checkpoint_of_the_second_run_needs_no_folder(base, tmp_path):
    trained(base).save_pretrained(tmp_path / "adapters")
    after = HFCausalLM(tmp_path / "adapters")
    run = one_step(tmp_path)
    run.fit(after, torch.utils.data.DataLoader([{k: v[0] for k, v in batch().items()}]))
    run.save_checkpoint(tmp_path / "run.ckpt")
    (tmp_path / "adapters").rename(tmp_path / "gone")
    base.rename(tmp_path / "base gone")
    loaded = HFCausalLM.load_from_checkpoint(tmp_path / "run.ckpt").eval()
    assert loaded.lora == after.lora and torch.equal(loaded(batch()), after.eval()(batch()))
    with pytest.raises(ValueError, match=r"which does not exist.*HFCausalLM\(base, adapters="):
        HFCausalLM(tmp_path / "gone")
    moved = HFCausalLM(tmp_path / "base gone", adapters=tmp_path / "gone")
    assert moved.lora == after.lora


def test_adapters_of_peft(base, tmp_path):
    """The folder of adapters was written by peft, not by this package."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=3, init_lora_weights=False, target_modules=["v_proj"])
    theirs = peft.get_peft_model(plain, options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = HFCausalLM(tmp_path / "theirs", HYBRID)
    assert ours.lora["r"] == 3 and len(ours.patterns) == 2
    ours.configure_model()
    ld.integrations.transformers.set_pattern(ours.decoder, None)
    want = theirs(batch()["tokens"]).logits
    torch.testing.assert_close(ours(batch()), want, rtol=0, atol=1e-6)


def test_misuse(base, tmp_path):
    folder = trained(base, 0).save_pretrained(tmp_path / "adapters")
    cases = [
        (ValueError, r"lora\.r is 4, and the adapters in .* have 2", {"model": folder, "lora": {"r": 4}}),
        (
            ValueError,
            r"lora\.target_modules is \['q_proj'\]",
            {"model": folder, "lora": {"target_modules": ["q_proj"]}},
        ),
        (ValueError, "and adapters=.* are both folders of adapters", {"model": folder, "adapters": folder}),
        (FileNotFoundError, "holds no adapter_config.json", {"model": base, "adapters": base}),
        (FileNotFoundError, "holds no adapter_config.json", {"model": base, "adapters": tmp_path / "nowhere"}),
        (TypeError, "adapters must be a folder", {"model": base, "adapters": 7}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            HFCausalLM(**options)
    other = HFCausalLM(config("llama", hidden_size=64)).save_pretrained(tmp_path / "other")
    (folder / "decoder_config.json").unlink()
    with pytest.raises(
        ValueError, match=r"do not fit LlamaForCausalLM: .*weight is .*Give the model that the adapters"
    ):
        HFCausalLM(other, adapters=folder).configure_model()
    options = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "base_model_name_or_path": str(base)}))
    with pytest.raises(ValueError, match="adapters of the kind IA3"):
        HFCausalLM(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**options, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not name the model"):
        HFCausalLM(folder)


@pytest.mark.parametrize("family, changes, words", [
    ("llama", {"num_hidden_layers": 3}, "num_hidden_layers=2, and this one has 3"),
    ("llama", {"num_hidden_layers": 1}, "num_hidden_layers=2, and this one has 1"),
    ("mistral", {}, "model_type='llama', and this one has 'mistral'"),
], ids=str)  # fmt: skip
def test_another_base(base, tmp_path, family, changes, words):
    """transformers would drop layers or initialize missing ones. A model of a different kind lacks this pattern."""
    trained(base, 0).save_pretrained(tmp_path / "adapters")
    other = HFCausalLM(config(family, **changes)).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=words):
        HFCausalLM(other, adapters=tmp_path / "adapters")


@pytest.mark.parametrize("name, text, words", [
    ("adapter_config.json", "{", "adapter_config.json is no JSON"),
    ("adapter_config.json", "[]", "adapter_config.json holds no JSON object, but list"),
    ("adapter_config.json", '{"base_model_name_or_path": 5}', "does not name the model"),
    ("decoder_config.json", "{", "decoder_config.json is no JSON"),
    ("adapter_model.safetensors", None, "but no adapter_model.safetensors"),
    ("adapter_model.safetensors", "x", "the weights of the adapters in .* cannot be read"),
], ids=str)  # fmt: skip
def test_damaged_folders(base, tmp_path, name, text, words):
    folder = trained(base, 0).save_pretrained(tmp_path / "adapters")
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        HFCausalLM(folder).configure_model()


def test_adapters_name_no_module(base, tmp_path, monkeypatch):
    """peft would import the module that `megatron_core` names."""
    (tmp_path / "evil_adapters.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = trained(base, 0).save_pretrained(tmp_path / "adapters")
    options = json.loads((folder / "adapter_config.json").read_text())
    options |= {"megatron_config": {"a": 1}, "megatron_core": "evil_adapters"}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    for arguments in ({"model": folder}, {"model": base, "adapters": folder}):
        with pytest.raises(ValueError, match="has megatron_config, with which peft imports the module"):
            HFCausalLM(**arguments).configure_model()
    assert not (tmp_path / "ran").exists()


def test_no_code_of_a_base_runs(base, tmp_path, monkeypatch):
    """The code is refused without a question at the terminal, which a user might confirm."""
    folder = trained(base, 0).save_pretrained(tmp_path / "adapters")
    values = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (base / "config.json").write_text(json.dumps(values))
    (base / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="needs code of its own, which HFCausalLM does not run"):
        HFCausalLM(folder)
    assert not (tmp_path / "ran").exists()
