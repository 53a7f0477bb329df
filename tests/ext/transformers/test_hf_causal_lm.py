"""HFCausalLM: losses equal transformers' own, and a training run on two ranks equals one rank."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
import transformers

from ...models import trainer
from ...strategy.runs import VOCAB, Run, fit
from .decoders import close, config, decoder, tokens

HFCausalLM = ld.integrations.transformers.HFCausalLM
N = 23
HYBRID = {"hybrid": {"local": 4, "global_every": 2}}


class Small(HFCausalLM):
    """Builds a small decoder, or loads a folder, from the arguments that `strategy.runs` passes to a LongNetLM."""

    def __init__(self, pattern, vocab_size, dim, depth, family="qwen3", own=None, folder=None, **options):
        options.setdefault("tile", 4)
        torch.manual_seed(2)
        super().__init__(
            config(family, vocab_size=vocab_size, hidden_size=dim, num_hidden_layers=depth), own, **options
        )


RUNS = {
    "own attention": Run(cls=Small),
    "sliding, documents": Run(cls=Small, kind="documents", model={"family": "gemma3", "depth": 3}),
    "hybrid": Run(cls=Small, model={"own": HYBRID, "tile": None}),
    "zigzag": Run(cls=Small, batch_size=2, strategy={"layout": "zigzag"}, steps=2),
    "sharded weights": Run(cls=Small, fsdp=True, double=True, steps=2),
    "padded": Run(cls=Small, kind="lengths", batch_size=2, masked=0.3),
    "sharded weights, groups of layers": Run(
        cls=Small, fsdp=True, double=True, memory={"every": 2, "offload": 1.0}, model={"tile": None}, steps=2
    ),
    "checkpointed": Run(cls=Small, model={"gradient_checkpointing": True, "family": "mistral"}, steps=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one(pools, name):
    check(pools, RUNS[name])


def test_a_folder_is_trained_on(pools, tmp_path):
    HFCausalLM(config("llama", vocab_size=VOCAB)).save_pretrained(tmp_path)
    losses = check(pools, Run(cls=Small, model={"folder": str(tmp_path)}, steps=1))
    assert losses != check(pools, Run(cls=Small, model={"family": "llama"}, steps=1))


def check(pools, run):
    """Check that two ranks have the results of one rank. Return the losses."""
    want = pools(1).run(1, fit, run.but(fsdp=False))[0]
    for got in pools(2).run(2, fit, run):
        for key in ("losses", "norms", "val_loss"):
            torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(want[key]), rtol=1e-6, atol=0)
        # fp32 rounding in Gemma's norms, which AdamW's first steps amplify
        close(got["parameters"], want["parameters"], 1e-5)
    assert len(want["losses"]) == run.steps
    return want["losses"]


def batch(rows=1):
    """Return tokens and the next tokens as labels."""
    inputs = tokens(rows, N)
    labels = inputs.roll(-1, 1)
    labels[:, -1] = -100
    return {"tokens": inputs, "labels": labels}


@pytest.mark.parametrize("tile", [None, 1, 7, 100])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi"])
def test_the_loss_is_that_of_transformers(family, tile):
    theirs = decoder(family, "sdpa", torch.float32)
    ours = HFCausalLM(config(family), tile=tile)
    ours.configure_model()
    ours.decoder.load_state_dict(theirs.state_dict())
    want = theirs(tokens(2, N), labels=tokens(2, N)).loss
    want.backward()
    total, count = ours.loss_terms(batch(2))
    (total / count).backward()
    close(
        {"loss": (total / count).detach(), **{n: p.grad for n, p in ours.decoder.named_parameters()}},
        {"loss": want.detach(), **{n: p.grad for n, p in theirs.named_parameters()}},
        1e-5,
    )


def test_documents_are_those_one_by_one():
    model = HFCausalLM(config("mistral"), HYBRID).double()
    whole = batch()
    whole["labels"][:, 8] = -100
    packed = model.loss_terms({**whole, "cu_seqlens": torch.tensor([0, 9, N], dtype=torch.int32)})
    apart = [model.loss_terms({k: v[:, a:b] for k, v in whole.items()}) for a, b in ((0, 9), (9, N))]
    torch.testing.assert_close(packed[0], apart[0][0] + apart[1][0], rtol=1e-6, atol=0)  # rotary tables are fp32
    assert packed[1] == apart[0][1] + apart[1][1] == N - 2


def test_folders_and_checkpoints(tmp_path):
    model = HFCausalLM(config("qwen3"), HYBRID, tile=8)
    want = model(batch())
    model.save_pretrained(tmp_path / "folder")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    assert plain.config._attn_implementation == "sdpa"
    ld.integrations.transformers.set_pattern(model.decoder, None)
    torch.testing.assert_close(plain(tokens(1, N)).logits, model(batch()), rtol=0, atol=1e-5)
    again = HFCausalLM.from_pretrained(tmp_path / "folder")
    assert again.patterns == HFCausalLM(config("qwen3"), HYBRID).patterns and len(again.patterns) == 2
    torch.testing.assert_close(again(batch()), want, rtol=0, atol=1e-6)

    run = one_step(tmp_path)
    run.fit(again, torch.utils.data.DataLoader([{k: v[0] for k, v in batch().items()}]))
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = HFCausalLM.load_from_checkpoint(tmp_path / "run.ckpt").eval()
    assert loaded.patterns == again.patterns
    torch.testing.assert_close(loaded(batch()), again.eval()(batch()), rtol=0, atol=1e-6)
    assert not torch.allclose(loaded(batch()), want, atol=1e-6)


def one_step(folder):
    return trainer(max_steps=1, default_root_dir=folder)


def test_metrics():
    model = HFCausalLM(config("llama"), bytes_per_token=4.0)
    values = model.derived_metrics(torch.tensor(2.0).log() * 8)
    assert values["bits_per_byte"] == 2 and values["perplexity"] == pytest.approx(256, rel=1e-5)


def test_bits_are_named_after_what_is_known(tmp_path):
    """Bits are per byte if bytes per token are known, else per token. For large vocabularies, 1 counts as unknown."""
    (tmp_path / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(400)))
    data = ld.data.ByteDataModule(str(tmp_path / "a.txt"), seq_len=100, val_fraction=0.2)
    wide, many = config("llama", vocab_size=256), config("llama", vocab_size=600)
    for model in (HFCausalLM(wide), HFCausalLM(many), HFCausalLM(many, bytes_per_token=1.0)):
        (metrics,) = one_step(tmp_path).validate(model, data, verbose=False)
        assert metrics["val_bits_per_byte"] == pytest.approx(metrics["val_loss"] / 0.6931472, rel=1e-6)
        assert "val_bits_per_token" not in metrics
        (metrics,) = one_step(tmp_path).validate(model, data.val_dataloader(), verbose=False)
        assert metrics["val_bits_per_token"] == pytest.approx(metrics["val_loss"] / 0.6931472, rel=1e-6)
        assert "val_bits_per_byte" not in metrics
    assert "bits_per_byte" in HFCausalLM(wide, bytes_per_token=1).derived_metrics(torch.tensor(1.0))


MISUSES = {
    "no config": (TypeError, "a folder, a hub repository or a config", {"model": 7}),
    "no model_type": (ValueError, "model_type", {"model": {"hidden_size": 8}}),
    "tile": (ValueError, "tile", {"tile": 0}),
    "tile of another head": (ValueError, "Leave tile out", {"model": config("GraniteConfig"), "tile": 4}),
    "pattern": (TypeError, "pattern must be", {"pattern": 5}),
    "bytes": (ValueError, "bytes_per_token", {"bytes_per_token": 0}),
    "compile_blocks": (TypeError, "compile_blocks must be True or False", {"compile_blocks": "yes"}),
    "checkpointing": (TypeError, "gradient_checkpointing", {"gradient_checkpointing": 1}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    error, message, options = MISUSES[name]
    with pytest.raises(error, match=message):
        HFCausalLM(**{"model": config("llama"), **options})


def test_the_users_config_stays_as_it_is():
    user_config = config("llama")
    before = re.sub(r"\s", "", str(user_config))
    F.relu(HFCausalLM(user_config, HYBRID)(batch()))
    assert re.sub(r"\s", "", str(user_config)) == before and user_config._attn_implementation != "ring_dilated"


def save_sharded(rank, group):
    model = HFCausalLM(config("llama"))
    model.configure_model()
    fully_shard(model.decoder, mesh=init_device_mesh("cpu", (2,)))
    model.save_pretrained("never written")


def test_sharded_weights_are_not_saved(pools):
    for answer in pools(2).answers(2, save_sharded):
        assert answer.error == "ValueError" and "sharded over ranks" in answer.message, answer.trace
