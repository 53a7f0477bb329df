"""Memory settings of HFCausalLM do not change gradients, even on several ranks. Errors name unsupported settings."""

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting.memory_tracker import PARAMETERS, Meter
from lightning_dilated.memory.settings import MemorySettings

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
import transformers

from .decoders import close, config, decoder, tokens
from .test_hf_causal_lm import HYBRID, batch

HFCausalLM = ld.integrations.transformers.HFCausalLM
LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
SETTINGS = {
    "block": MemorySettings("block"),
    "attention-kept": MemorySettings("attention-kept"),
    "groups": MemorySettings("block", every=2),
    "offloaded": MemorySettings("block", offload=1.0),
    "offloaded, kept": MemorySettings("attention-kept", offload=0.5),
    "tiles": MemorySettings(tile=7),
    "all": MemorySettings("block", every=2, offload=0.5, tile=5),
}


def gradients(settings=None, lora=None, family="llama", pattern=None):
    """Return (loss and gradients of a step in float64, layers in the order in which they ran)."""
    torch.manual_seed(2)
    model = HFCausalLM(config(family, num_hidden_layers=3), pattern, lora=lora).double().train()
    if settings is not None:
        model.transformer.memory = settings
    runs = []
    for i, layer in enumerate(model.transformer.blocks):
        layer.self_attn.register_forward_hook(lambda *_, i=i: runs.append(i))
    total, _ = model.loss_terms(batch(2))
    total.backward()
    return {"loss": total.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}, runs


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_stay(name, lora):
    if lora is not None:
        pytest.importorskip("peft", reason="needs the extra lora")
    settings = SETTINGS[name]
    for family, pattern in (("llama", None), ("gemma3", HYBRID), ("phi", HYBRID)):
        targets = {} if lora is None or family != "phi" else {"target_modules": ["q_proj", "fc2"]}
        lora_options = None if lora is None else {**lora, **targets}
        want, once = gradients(None, lora_options, family, pattern)
        got, runs = gradients(settings, lora_options, family, pattern)
        close(got, want, 1e-12 if family != "gemma3" else 1e-6)  # Gemma's norms compute in fp32
        times = 1 + (settings.policy != "none")
        in_group = settings.every > 1  # the group's first layer runs again to compute the second layer's input
        assert sorted(once) == [0, 1, 2] and sorted(runs) == sorted([0, 1, 2] * times + [0] * in_group)


def test_names_stay():
    plain, changed = (HFCausalLM(config("llama")) for _ in range(2))
    changed.configure_model()
    changed.transformer.memory = SETTINGS["all"]
    changed.train().loss_terms(batch())[0].backward()
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in changed.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_what_is_saved_is_less():
    """Compare the bytes that are allocated after the forward."""
    saved = {}
    for name, settings in {"none": MemorySettings(), **SETTINGS}.items():
        torch.manual_seed(2)
        model = HFCausalLM(config("llama", num_hidden_layers=4)).train()
        model.configure_model()
        model.transformer.memory = settings
        with Meter() as meter:
            total, _ = model.loss_terms(batch(2))
            saved[name] = meter.live + 0 * total.ndim
    assert saved["groups"] < saved["block"] < saved["attention-kept"] < saved["none"]
    assert saved["tiles"] < saved["none"]


@pytest.mark.parametrize("intermediate", [64, 688])
def test_no_more_memory_than_with_sdpa(intermediate):
    """Compare peaks while layers are recomputed under autocast, where rotary tables would convert q and k to fp32."""
    peaks = {}
    sizes = {"hidden_size": 256, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    for implementation in ("ring_dilated", "sdpa"):
        model = decoder("llama", implementation, torch.float32, intermediate_size=intermediate, **sizes).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.model(tokens(1, 1024))[0].square().mean()
        with Meter() as meter:
            meter.track(model.parameters(), PARAMETERS)
            loss.backward()
        peaks[implementation] = meter.peak
    assert peaks["ring_dilated"] <= peaks["sdpa"]


@pytest.mark.parametrize("settings, message, family", [
    ({"head_chunks": 2}, "head_chunks=2 is not offered for LlamaDecoderLayer", "llama"),
    ({"stream": 8}, "stream=8 computes a sequence chunk by chunk, and HFCausalLM cannot", "llama"),
    ({"tile": 4}, "tile=4 needs a feed-forward `mlp`.*GraniteDecoderLayer", "GraniteConfig"),
], ids=str)  # fmt: skip
def test_refused(settings, message, family):
    from lightning_dilated.memory.block_memory import set_memory

    model = HFCausalLM(config(family))
    model.configure_model()
    with pytest.raises(ValueError, match=message):
        set_memory(model, MemorySettings(**settings))
    assert model.transformer.memory == MemorySettings()


def test_layers_that_transformers_cannot_recompute():
    from lightning_dilated.memory.block_memory import set_memory

    model = HFCausalLM(config("llama"))
    model.configure_model()
    del model.transformer
    with pytest.raises(ValueError, match="HFCausalLM has none"):
        set_memory(model, MemorySettings("block"))
    assert isinstance(model.decoder, transformers.LlamaForCausalLM)
