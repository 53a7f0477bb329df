"""Training and evaluation on batches of streams: a model carries a state per stream number from batch to batch."""

import contextlib
import gc
import io
import warnings
import weakref
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.throughput import Throughput

import lightning_dilated as ld
from lightning_dilated.callbacks import LossByPosition, RecallByDistance, ThroughputMonitor
from lightning_dilated.ext.streams.carried import CarriedStreams
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import step_flops

from ...examples import examples
from ...models import trainer
from ...strategy.runs import Losses
from .test_endless import MODELS, VOCABULARY, call
from .test_streaming import GEOMETRIC, lm

TOKENS = torch.randint(0, VOCABULARY, (3, 121), generator=torch.Generator().manual_seed(5))


def batch(at, n, rows=(0, 1, 2), positions=True, tokens=TOKENS, starts=None):
    """Return a batch with tokens [at, at + n) of the given streams."""
    rows = list(rows)
    begin = torch.zeros(len(rows), n, dtype=torch.bool) if starts is None else starts[rows, at : at + n].clone()
    begin[:, 0] |= at == 0
    out = {"tokens": tokens[rows, at : at + n], "labels": tokens[rows, at + 1 : at + n + 1], "starts": begin}
    place = {"position": torch.full((len(rows),), at)} if positions else {}
    return {**out, "stream": torch.tensor(rows), **place}


@pytest.mark.parametrize("name", sorted(MODELS))
@given(st.data())
@settings(max_examples=examples(3))
def test_select_and_join(name, data):
    """Samples of a state are separated and joined in another order. They continue as before."""
    model = MODELS[name].eval()
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    starts = torch.rand(3, 121, generator=torch.Generator().manual_seed(sum(sizes))) < 0.05
    n = sum(sizes)
    with torch.no_grad():
        _, states = call(model, TOKENS[:, :n], sizes, starts[:, :n])
        want, after = model.stream(TOKENS[:, n:], None, states[-1], per_token=True, starts=starts[:, n:])
        order = data.draw(st.permutations([0, 1, 2]))
        parts = [states[-1].select(i) for i in order]
        state = ld.StreamState.join([ld.StreamState.join(parts[:2]), parts[2]])
        got, last_state = model.stream(TOKENS[order, n:], None, state, per_token=True, starts=starts[order, n:])
    torch.testing.assert_close(got, want[order], rtol=1e-10, atol=1e-10)
    assert last_state.nbytes == after.nbytes and sum(p.nbytes for p in parts) == states[-1].nbytes
    assert not any(x.requires_grad for x, _ in state.rows.values())
    again = ld.StreamState.join([state])
    assert again.starts == state.starts == [states[-1].starts[i] for i in order]
    assert all(torch.equal(again.rows[k][0], x) and again.rows[k][1] == p for k, (x, p) in state.rows.items())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_new_sample_joins_old_ones(name):
    model = MODELS[name].eval()
    starts = torch.zeros(3, 21, dtype=torch.bool)
    starts[1, 0] = True
    with torch.no_grad():
        _, (state,) = call(model, TOKENS[:, :100], [100])
        want, _ = model.stream(TOKENS[:, 100:], TOKENS[:, 100:].roll(-1, 1), state, per_token=True, starts=starts)
        state = ld.StreamState.join([state.select(0), ld.StreamState(100, [100]), state.select(2)])
        got, _ = model.stream(TOKENS[:, 100:], TOKENS[:, 100:].roll(-1, 1), state, per_token=True, starts=starts)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"got 2, at positions \[0, 100\]"):
        ld.StreamState.join([state, ld.StreamState(0, [0])])
    with pytest.raises(ValueError, match="got 0"):
        ld.StreamState.join([])


@pytest.mark.parametrize(
    "name, positions",
    [
        *((name, True) for name in sorted(MODELS)),
        ("convolution", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in sorted(MODELS) if name != "convolution"),
    ],
)
def test_losses_are_those_of_the_whole(name, positions):
    """Losses equal the losses of the whole sequence, even if the grouping of streams changes or documents begin."""
    model = MODELS[name].train()
    model.streaming.carried.clear()
    starts = torch.rand(3, 121, generator=torch.Generator().manual_seed(0)) < 0.05
    starts[:, 0] = True
    steps = [(0, 30, [(0, 1, 2)]), (30, 30, [(2, 0), (1,)]), (60, 30, [(0, 1), (2,)]), (90, 30, [(0, 1, 2)])]
    got = 0.0
    for at, n, groups in steps:
        for rows in groups:
            total, count = model.loss_terms(batch(at, n, rows, positions, starts=starts))
            assert count == n * len(rows) and total.requires_grad
            got += total.detach()
    whole, _ = model.stream(TOKENS[:, :120], TOKENS[:, 1:], starts=starts[:, :120], chunk=120)
    torch.testing.assert_close(got, whole.detach(), rtol=1e-10, atol=1e-10)


def test_gradients_are_truncated_at_steps():
    """Gradients end at steps, as with `truncate` and chunks of a step's length. Shorter chunks truncate further."""
    model = MODELS["convolution"].train()
    model.transformer.memory = MemorySettings(stream=20, truncate=True)
    model.zero_grad()
    model.loss_terms({"tokens": TOKENS[:, :120], "labels": TOKENS[:, 1:]})[0].backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    for step, memory in ((20, MemorySettings()), (40, MemorySettings(stream=20))):
        model.transformer.memory = memory
        model.streaming.carried.clear()
        model.zero_grad()
        for at in range(0, 120, step):
            model.loss_terms(batch(at, step))[0].backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, want[name], rtol=1e-10, atol=1e-10)
    model.transformer.memory = MemorySettings()


def test_a_stream_without_its_state():
    model = lm().train()
    for positions in (True, False):
        with pytest.raises(ValueError, match=r"streams \[0, 1, 2\] continue in the middle.*Resume from a checkpoint"):
            model.loss_terms(batch(30, 30, positions=positions))
    model.loss_terms(batch(0, 30))
    with pytest.raises(ValueError, match="stream 0 continues at its token 60, but the model has read it to token 30"):
        model.loss_terms(batch(60, 30))
    model.loss_terms(batch(0, 30))  # the epoch ended early
    model.loss_terms(batch(30, 30))
    with pytest.raises(ValueError, match="each stream only once"):
        model.loss_terms(batch(0, 30, (1, 1)))


def test_refusals():
    model = lm().train()
    with pytest.raises(ValueError, match=r"\['cu_seqlens'\]: leave it out"):
        model.loss_terms({**batch(0, 30), "cu_seqlens": torch.tensor([0, 30], dtype=torch.int32)})
    with pytest.raises(ValueError, match="call loss_terms, or use torch"):
        model.token_losses(batch(0, 30))
    model.watch_losses = lambda *x: None
    with pytest.raises(ValueError, match="LossByPosition"):
        model.loss_terms(batch(0, 30))

    class Redefined(ld.LongNetLM):
        def token_losses(self, batch):
            return super().token_losses(batch)

    with pytest.raises(ValueError, match="Redefined redefines token_losses"):
        Redefined(GEOMETRIC, VOCABULARY, 16, 1, 4).loss_terms(batch(0, 30))


def test_other_head_chunks():
    """A state stores rows by chunks of heads, so a different number of chunks is refused."""
    for before, after in ((1, 2), (2, 1), (4, 2)):
        model = lm().train()
        model.transformer.memory = MemorySettings(head_chunks=before)
        model.loss_terms(batch(0, 30))
        model.loss_terms(batch(30, 30))
        model.transformer.memory = MemorySettings(head_chunks=after)
        with pytest.raises(ValueError, match=f"head_chunks={before}, but the memory settings have {after}"):
            model.loss_terms(batch(60, 30))


# -- in a Trainer ------------------------------------------------------------------------------------------------------
SIZE, STREAMS, STEP = 650, 3, 16
WIDE = ld.DilatedPattern.longnet([8, 64], [1, 2])


def fitted(tmp_path, steps, ckpt=None, model=None, streams=STREAMS, separator=3, **options):
    """Return (trainer, model, data, losses) of a run. Byte 3 ends a document."""
    values = torch.randint(0, VOCABULARY, (SIZE,), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    (tmp_path / "text").write_bytes(values.numpy().tobytes())
    data = ld.data.StreamDataModule(
        str(tmp_path / "text"), STEP, streams, separator, val_fraction=0.25, test_fraction=0.1
    )
    data.vocab_size = VOCABULARY
    pl.seed_everything(1, verbose=False)
    model = model or ld.LongNetLM(WIDE, VOCABULARY, 16, 2, 2, kv_conv=3)
    record = Losses()
    options = {"num_sanity_val_steps": None, "precision": "64-true", **options}
    built = trainer(devices=1, max_steps=steps, callbacks=[record, *options.pop("callbacks", [])], **options)
    built.fit(model, data, ckpt_path=ckpt)
    return built, model, data, record.losses


@pytest.mark.full
@pytest.mark.parametrize("stop", [3, 8, 11])
def test_resuming_within_an_epoch(tmp_path, stop):
    """An epoch has 8 steps."""
    _, model, _, whole = fitted(tmp_path, 13)
    trainer, _, _, first = fitted(tmp_path, stop)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    held = torch.load(tmp_path / "a.ckpt", weights_only=True)["streams"]
    assert sorted(held) == [0, 1, 2]
    _, again, _, resumed = fitted(tmp_path, 13, tmp_path / "a.ckpt")
    assert len(first + resumed) == 13
    assert first + resumed == pytest.approx(whole, rel=1e-9)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_a_batch_that_failed_is_not_in_the_checkpoint(tmp_path):
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer, *args):
            if trainer.global_step == 4:
                raise KeyboardInterrupt

        def on_exception(self, trainer, *args):
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    _, _, _, whole = fitted(tmp_path, 6)
    with pytest.raises(SystemExit):
        fitted(tmp_path, 6, callbacks=[Fails()])
    states = torch.load(tmp_path / "a.ckpt", weights_only=True)["streams"]
    assert {x["position"] for x in states.values()} == {4 * STEP}
    _, _, _, resumed = fitted(tmp_path, 6, tmp_path / "a.ckpt")
    assert resumed == pytest.approx(whole[4:], rel=1e-9)


@pytest.mark.full
def test_validation_is_that_of_the_whole(tmp_path):
    """Even in mid-training, validation has the loss of the whole sequence, not the loss of separate windows."""
    checks = {"val_check_interval": 3, "num_sanity_val_steps": 2}
    trainer, model, data, losses = fitted(tmp_path, 5, **checks)
    assert losses == pytest.approx(fitted(tmp_path, 5, limit_val_batches=0)[3], rel=1e-12)
    got = float(trainer.validate(model, data, verbose=False)[0]["val_loss"])
    tested = float(trainer.test(model, data, verbose=False)[0]["test_loss"])
    bits = trainer.predict(model, data)
    assert not model.streaming.carried_in_evaluation and model.streaming.carried
    for split, loss in (("val", got), ("test", tested)):
        steps = list(getattr(data, f"{split}_dataloader")())
        tokens, labels, starts = (torch.cat([b[x] for b in steps], 1) for x in ("tokens", "labels", "starts"))
        model.eval()
        with torch.no_grad():
            whole, _ = model.stream(tokens, labels, starts=starts)
            alone = sum(model.stream(b["tokens"], b["labels"], starts=b["starts"])[0] for b in steps)
        count = (labels != -100).sum()
        assert loss == pytest.approx(float(whole / count), rel=1e-6)  # torchmetrics computes sums in float32
        assert abs(float(alone / count) - loss) > 1e-3
    nats = sum((b["bits_per_byte"] * b["tokens"]).sum() for b in bits) * torch.log(
        torch.tensor(2.0, dtype=torch.float64)
    )
    assert float(nats / count) == pytest.approx(tested, rel=1e-6)


@pytest.mark.full
def test_accumulation_and_other_models(tmp_path):
    """Streams also continue in micro-batches. A model without carried state is refused."""
    _, model, _, _ = fitted(tmp_path, 3, accumulate_grad_batches=2)
    states, _ = model.streaming.carried.state_dicts(None)
    assert {x["position"] for x in states.values()} == {6 * STEP}
    with pytest.raises(TypeError, match="LongNetMLM has no method `stream`"):
        fitted(tmp_path, 1, model=ld.LongNetMLM(GEOMETRIC, vocab_size=VOCABULARY, dim=16, depth=1, num_heads=4))


@pytest.mark.full
def test_losses_by_position_are_refused_before_any_work(tmp_path):
    """LossByPosition is refused in a fit without a sanity check and in a validation, RecallByDistance in a test run."""
    model = ld.LongNetLM(WIDE, VOCABULARY, 16, 1, 2)
    with pytest.raises(
        ValueError, match=r"LossByPosition needs positions.*StreamDataModule are steps.*remove the callback, or"
    ):
        fitted(tmp_path, 3, model=model, callbacks=[LossByPosition()], num_sanity_val_steps=0)
    assert not model._built, "layers were made"
    trainer, model, data, _ = fitted(tmp_path, 1)
    trainer.callbacks.append(LossByPosition())
    with pytest.raises(ValueError, match="LossByPosition needs positions"):
        trainer.validate(model, data, verbose=False)
    trainer.test(model, data, verbose=False)
    trainer.callbacks[-1] = RecallByDistance()
    data.distances = lambda split, index: torch.zeros(STEP)
    with pytest.raises(ValueError, match="RecallByDistance needs positions"):
        trainer.test(model, data, verbose=False)


@pytest.mark.full
def test_flops_of_steps(tmp_path):
    """A step attends to earlier steps. So does a step of a validation, which starts with new states."""
    counted, update = [], Throughput.update
    spy = lambda self, **x: counted.append(x["flops"]) or update(self, **x)  # noqa: E731
    with mock.patch.object(Throughput, "update", spy):
        monitor = ThroughputMonitor(window_size=2)
        options = {"val_check_interval": 3, "num_sanity_val_steps": 0, "limit_val_batches": 2}
        _, model, _, _ = fitted(tmp_path, 4, separator=None, callbacks=[monitor], **options)
    flops = lambda at, trains: step_flops(model, STREAMS * STEP, [range(at, at + STEP)] * STREAMS, trains)  # noqa: E731
    train, val = ([flops(at, trains) for at in range(0, 4 * STEP, STEP)] for trains in (True, False))
    assert counted == [*train[:3], *val[:2], train[3]] and len(set(train)) == 4


@pytest.mark.full
@pytest.mark.parametrize("steps", [7, 13])
def test_the_pattern_is_checked_as_documents_grow(tmp_path, steps):
    """A step is too short to check the pattern, so it is checked once, when documents are long enough."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(tmp_path, steps, separator=None)
    lines = [str(w.message) for w in caught if "wall(s)" in str(w.message)]
    assert len(lines) == (steps > 7)
    assert all("LongNetLM.pattern at 128 tokens: 1 wall(s): attention never crosses position 64" in x for x in lines)


@pytest.mark.full
def test_a_checkpoint_without_states(tmp_path):
    trainer, *_ = fitted(tmp_path, 3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    file = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del file["streams"]
    buffer = io.BytesIO()
    torch.save(file, buffer)
    (tmp_path / "a.ckpt").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"streams \[0, 1, 2\] continue in the middle"):
        fitted(tmp_path, 5, tmp_path / "a.ckpt")


def tensors(state):
    """Return all tensors in a state."""
    return [*(x for x, _ in state.rows.values()), *state.tails.values(), state.hidden]


def test_states_move_together():
    """States from before the last batch move as well. Shared states remain shared."""
    model = MODELS["convolution"].train()
    model.streaming.carried.clear()
    model.loss_terms(batch(0, 30, (0, 1)))
    model.loss_terms(batch(0, 30, (2,)))
    carried = model.streaming.carried
    assert carried._now[0, 1] is carried._before[0, 1] and len(tensors(carried._now[0, 1])) > 4
    carried.to("meta")
    assert all(x.is_meta for state in carried._now.values() for x in tensors(state))
    assert carried._now[0, 1] is carried._before[0, 1] and len(carried._now) == 2 and len(carried._before) == 1
    carried.clear()


@pytest.mark.full
def test_what_a_run_leaves(tmp_path):
    """Between batches, only the last state exists. After a run, states for fit and evaluation are on the host."""
    refs, moved, move = [], [], CarriedStreams.to
    put = CarriedStreams.put

    def watched(self, streams, state):
        refs.append(weakref.ref(state))
        put(self, streams, state)

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            gc.collect()
            assert sum(x() is not None for x in refs) == min(1, trainer.global_step)

    to = mock.patch.object(
        CarriedStreams, "to", lambda self, device: moved.append((self, device)) or move(self, device)
    )
    with to, mock.patch.object(CarriedStreams, "put", watched):
        _, model, _, _ = fitted(tmp_path, 4, callbacks=[Looks()], limit_val_batches=0)
    assert (
        len(refs) == 4
        and (model.streaming.carried, "cpu") in moved
        and (model.streaming.carried_in_evaluation, "cpu") in moved
    )


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.full
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=GPU)])
@pytest.mark.parametrize("fails", [False, True])
def test_states_wait_on_the_host_between_runs(tmp_path, accelerator, fails):
    """After a run, even a failed one, a validation, checkpoint or further fit uses the states, with the same losses."""

    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer, *args):
            if fails and trainer.global_step == 4:
                raise KeyboardInterrupt

    where = {"accelerator": accelerator, "precision": "32-true", "limit_val_batches": 2, "num_sanity_val_steps": 0}
    _, _, _, whole = fitted(tmp_path, 8, **where)
    model = ld.LongNetLM(WIDE, VOCABULARY, 16, 2, 2, kv_conv=3)
    with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
        fitted(tmp_path, 5 if fails else 4, model=model, callbacks=[Fails()], **where)
    on_host(model.streaming.carried)
    trainer = model.trainer
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    if not fails:
        trainer.validate(model, trainer.datamodule, verbose=False)
        on_host(model.streaming.carried)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    positions = {x["position"] for x in torch.load(tmp_path / "a.ckpt", weights_only=True)["streams"].values()}
    assert positions == {4 * STEP}
    _, again, _, resumed = fitted(tmp_path, 8, tmp_path / "a.ckpt", **where)
    assert resumed == pytest.approx(whole[4:], rel=1e-4)
    on_host(again.streaming.carried)


def on_host(carried):
    """Assert that states exist and that all of them are on the CPU."""
    states = [*carried._now.values(), *carried._before.values()]
    assert states and all(x.device.type == "cpu" for state in states for x in tensors(state))


def test_fits_that_follow_one_another_go_on():
    """Each fit numbers its batches from 0. The first batch of a fit must not be taken for a recomputation."""
    from torch.utils.data import DataLoader

    model, states = ld.LongNetLM(ld.DilatedPattern.dense(8), 16, 16, 1, 2, max_seq_len=64), []
    stream = model.stream

    def watched(tokens, labels, state, **options):
        states.append(state.position)
        return stream(tokens, labels, state, **options)

    model.stream = watched
    tokens = torch.randint(0, 16, (4, 1, 8))
    batches = [
        {"tokens": x, "labels": x, "stream": torch.tensor([0]), "starts": torch.tensor([[i == 0] + [False] * 7])}
        for i, x in enumerate(tokens)
    ]
    for part in (batches[:2], batches[2:3], batches[3:]):
        trainer(max_epochs=1).fit(model, DataLoader(part, batch_size=None))
    assert states == [0, 8, 16, 24]
