"""LoRA in HFCausalLM trains only adapters, equally on one rank and many. peft and transformers read its folders."""

import sys
import warnings

import lightning.pytorch as pl
import pytest
import torch

import lightning_dilated as ld

from ...strategy.runs import Run

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
pytest.importorskip("peft", reason="needs the extra lora")
import peft
import transformers

from ...models import trainer
from .decoders import close, config, tokens
from .test_hf_causal_lm import HYBRID, N, Small, batch, check, one_step

HFCausalLM = ld.integrations.transformers.HFCausalLM
LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


def model(family="qwen3", **options):
    """Build a small model with adapters that are not zero."""
    torch.manual_seed(2)
    return HFCausalLM(config(family), lora=LORA, **options)


def is_adapter(name):
    return ".lora_" in name


def test_peft_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model().configure_model()


RUNS = {
    "hybrid, documents": Run(cls=Small, kind="documents", model={"lora": LORA, "own": HYBRID, "family": "mistral"}),
    "sharded weights": Run(cls=Small, fsdp=True, double=True, model={"lora": LORA}, steps=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one(pools, name):
    check(pools, RUNS[name])


@pytest.mark.parametrize("options", [{}, {"tile": 5}, {"gradient_checkpointing": True}], ids=str)
def test_gradients_are_those_of_the_whole_model(options):
    """The gradients of B and A equal those derived from the gradient of the whole weight W + s B A."""
    ours = model(**options).double()
    total, _ = ours.loss_terms(batch())
    total.backward()
    scale = LORA["lora_alpha"] / LORA["r"]
    whole = HFCausalLM(config("qwen3")).double()
    whole.configure_model()
    state = {}
    for name, value in ours.decoder.state_dict().items():
        if not is_adapter(name):
            state[name.replace(".base_layer", "")] = value.clone()
    pairs = {}
    for name, value in ours.decoder.named_parameters():
        if name.endswith(".lora_A.default.weight"):
            layer = name.removesuffix(".lora_A.default.weight")
            pairs[layer] = value, ours.decoder.get_parameter(f"{layer}.lora_B.default.weight")
    for layer, (a, b) in pairs.items():
        state[f"{layer}.weight"] += scale * (b @ a).detach()
    whole.decoder.load_state_dict(state)
    want, _ = whole.loss_terms(batch())
    want.backward()
    torch.testing.assert_close(total, want, rtol=1e-6, atol=0)  # rotary tables have fp32 rounding
    for layer, (a, b) in pairs.items():
        grad = whole.decoder.get_parameter(f"{layer}.weight").grad
        close({"a": a.grad, "b": b.grad}, {"a": scale * b.T @ grad, "b": scale * grad @ a.T}, 1e-6)
    assert len(pairs) == 2 * len(LORA["target_modules"])


@pytest.mark.full
def test_adapters_alone_train_and_a_checkpoint_holds_all(tmp_path):
    trained = model(pattern=HYBRID, tile=8)
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    run = one_step(tmp_path)
    run.fit(trained, torch.utils.data.DataLoader([{k: v[0] for k, v in batch().items()}]))
    moved = {name for name, p in trained.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if is_adapter(name)} and len(moved) == 12
    states = run.optimizers[0].state
    assert {id(p) for p in states} == {id(p) for n, p in trained.named_parameters() if is_adapter(n)}
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = HFCausalLM.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True).eval()
    assert loaded.lora == LORA and loaded.patterns == trained.patterns
    assert torch.equal(loaded(batch()), trained.eval()(batch()))
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == moved


@pytest.mark.full
def test_adapters_stay_wide(tmp_path):
    trained = model()
    exact = {n: p.detach().clone() for n, p in trained.named_parameters() if is_adapter(n)}
    dtypes = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer, module):
            dtypes.update({n: p.dtype for n, p in module.named_parameters()})
            assert all(torch.equal(p, exact[n]) for n, p in module.named_parameters() if is_adapter(n))

    run = trainer(max_steps=1, precision="bf16-true", callbacks=[Look()], default_root_dir=tmp_path)
    run.fit(trained, torch.utils.data.DataLoader([{k: v[0] for k, v in batch().items()}]))
    assert {name: torch.float32 if is_adapter(name) else torch.bfloat16 for name in dtypes} == dtypes
    assert {p.dtype for p in trained.double().parameters()} == {torch.float64}


def test_adapters_begin_as_no_change():
    torch.manual_seed(2)
    plain = HFCausalLM(config("llama"))
    want = plain(batch())
    torch.manual_seed(2)
    assert torch.equal(HFCausalLM(config("llama"), lora={"r": 2})(batch()), want)  # targets are peft's for Llama


def test_folders(tmp_path):
    base = HFCausalLM(config("llama")).save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    ours = HFCausalLM(base, lora=LORA, pattern=HYBRID)
    ours.save_pretrained(tmp_path / "adapters")
    ours.save_pretrained(tmp_path / "merged", merge=True)
    ld.integrations.transformers.set_pattern(ours.decoder, None)
    want = ours(batch())

    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert type(merged).__name__ == "LlamaForCausalLM" and not any(is_adapter(n) for n, _ in merged.named_parameters())
    torch.testing.assert_close(merged(tokens(1, N)).logits, want, rtol=0, atol=1e-6)
    assert HFCausalLM(tmp_path / "merged").patterns == ours.patterns  # the merged model's config contains them
    assert torch.equal(ours(batch()), want)  # only a copy was merged

    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    torch.testing.assert_close(adapted(tokens(1, N)).logits, want, rtol=0, atol=1e-6)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapters", dtype=torch.float32)
    torch.testing.assert_close(alone(tokens(1, N)).logits, want, rtol=0, atol=1e-6)  # the folder has the base's path


def test_tied_embeddings_and_further_modules(tmp_path):
    """`modules_to_save` trains copies of modules, and a folder with tied embeddings can be merged."""
    ours = HFCausalLM(config("gemma3"), lora={**LORA, "modules_to_save": ["norm"]}, tile=7)
    total, _ = ours.loss_terms(batch())
    total.backward()
    grads = {name for name, p in ours.named_parameters() if p.grad is not None}
    assert grads == {n for n, _ in ours.named_parameters() if is_adapter(n) or "modules_to_save" in n}
    ours.save_pretrained(tmp_path, merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(merged(tokens(1, N)).logits, ours(batch()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head", "embed_tokens"], "use_dora": True},
        {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_adapters_of_tied_embeddings_are_merged(tmp_path, family, more):  # fmt: skip
    """The merged folder computes the same function, and the embeddings of the trained model remain tied."""
    ours = HFCausalLM(config(family, tie_word_embeddings=True), lora={"r": 4, **more}).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.1 * torch.randn_like(p) if p.requires_grad else 0)
        want = ours(batch())
        ours.save_pretrained(tmp_path, merge=True)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        torch.testing.assert_close(merged(tokens(1, N)).logits, want, rtol=0, atol=1e-5)
        assert torch.equal(ours(batch()), want)
    assert ours.config.tie_word_embeddings
    assert merged.config.tie_word_embeddings == (more == {"target_modules": ["q_proj"]})


@pytest.mark.parametrize("lora, error, message", [
    ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, ValueError, "share their adapters or copies, which"),
    ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, ValueError, "share their adapters or copies, which"),
    (8, TypeError, "lora must be a mapping"),
    ({"rank": 8}, ValueError, "lora has no key 'rank'.*Allowed keys: .*r, "),
    ({"r": 0}, ValueError, r"lora\.r must be at least 1"),
    ({"r": "8"}, TypeError, r"lora\.r must be an integer"),
    ({"lora_dropout": 1.0}, ValueError, r"lora\.lora_dropout"),
    ({"target_modules": ["q_proj", "query"]}, ValueError, r"lora\.target_modules has 'query'.*q_proj, k_proj"),
    ({"target_modules": "nothing"}, ValueError, "lora does not fit LlamaForCausalLM.*q_proj"),
    ({"target_modules": ["input_layernorm"]}, ValueError, "lora does not fit LlamaForCausalLM.*q_proj"),
    ({"modules_to_save": ["head"]}, ValueError, r"lora\.modules_to_save has 'head'"),
    ({"inference_mode": True}, ValueError, "lora takes no inference_mode"),
    ({"layer_replication": [[0, 1]]}, ValueError, "lora takes no layer_replication"),
    ({"bias": "some"}, ValueError, "lora does not fit.*bias"),
], ids=str)  # fmt: skip
def test_misuse(lora, error, message):
    with pytest.raises(error, match=message):
        HFCausalLM(config("llama"), lora=lora)


def test_without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r'lora needs peft: pip install "lightning-dilated\[lora\]"'):
        HFCausalLM(config("llama"), lora={"r": 2})
    HFCausalLM(config("llama"))  # peft is not needed without `lora`
