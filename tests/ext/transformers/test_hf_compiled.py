"""HFCausalLM(compile_blocks=True) has the same losses and gradients, and equal layers share one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lightning_dilated as ld
from lightning_dilated.memory.settings import MemorySettings

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from .decoders import close, config, tokens
from .test_hf_causal_lm import HYBRID, N, batch

pytestmark = pytest.mark.full

HFCausalLM = ld.integrations.transformers.HFCausalLM


@pytest.fixture
def counter():
    """Return a backend that counts graphs. It compiles with AOTAutograd, without Inductor."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance("default", force_backend=counter):
        yield counter
    torch.compiler.reset()


def step(family, compiled, data, settings=None, **options):
    torch.manual_seed(2)
    model = HFCausalLM(config(family, num_hidden_layers=4), compile_blocks=compiled, **options).double()
    model.transformer.memory = settings or MemorySettings()
    total, _ = model.train().loss_terms(data)
    total.backward()
    return {"loss": total.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("family, options, settings, graphs", [
    ("llama", {}, None, 1),
    ("qwen3", {"pattern": HYBRID}, None, 2),
    ("phi", {}, MemorySettings("block", every=2), 1),
    ("llama", {"pattern": HYBRID}, MemorySettings("attention-kept"), 2),
    ("llama", {"tile": 8, "gradient_checkpointing": True}, MemorySettings("block"), 1),
    ("llama", {"lora": {"r": 2}}, None, 2),  # the input of the first layer needs no gradient
], ids=str)  # fmt: skip
def test_equal_layers_share_a_graph(counter, family, options, settings, graphs):
    if "lora" in options:
        pytest.importorskip("peft", reason="needs the extra lora")
    want = step(family, False, batch(2), settings, **options)
    assert counter.frame_count == 0
    close(step(family, True, batch(2), settings, **options), want, 1e-12)
    assert counter.frame_count == graphs


def test_documents_and_padding(counter):
    documents = {**batch(), "cu_seqlens": torch.tensor([0, 9, N], dtype=torch.int32)}
    padded = {**batch(2), "lengths": torch.tensor([N, 7])}
    for data in (documents, padded):
        close(step("mistral", True, data), step("mistral", False, data), 1e-12)


def test_decoding_is_not_compiled(counter):
    model = HFCausalLM(config("llama"), compile_blocks=True).eval()
    want = HFCausalLM(config("llama")).eval()
    want.load_state_dict(model.state_dict())
    ids = tokens(1, 5)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.decoder.generate(ids, **options), want.decoder.generate(ids, **options))
    assert counter.frame_count == 0


def test_tiles_are_refused():
    model = HFCausalLM(config("llama"), compile_blocks=True)
    model.configure_model()
    with pytest.raises(ValueError, match=r"tile=8 runs the feed-forward of LlamaDecoderLayer.*compile_blocks=False"):
        model.transformer.memory = MemorySettings(tile=8)
