"""A schedule of sequence lengths: the batches of each optimizer step have its length, however the run is cut up."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.data import ByteDataModule, GenomeDataModule, TokenDataModule
from lightning_dilated.data.schedule import ScheduledSequences, SeqLenSchedule, collate_rows
from lightning_dilated.sequence.shard import Place, SequenceSpec
from lightning_dilated.strategy.loader import RankDataset

from ..examples import examples
from .runs import Recorder, data, every_step, run

LENGTHS = {0: 1, 2: 2, 5: 4, 9: 1, 12: 4}


def wanted(step: int) -> int:
    return LENGTHS[max(s for s in LENGTHS if s <= step)]


class Lengths(pl.Callback):
    """(optimizer steps done, the batch's tokens) of each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append((trainer.global_step, batch["tokens"]))


@pytest.mark.parametrize("options, loading", [({}, {}), ({"accumulate_grad_batches": 3}, {"num_workers": 2})])
def test_each_step_has_its_length(file, options, loading):
    lengths = Lengths()
    run(data(file, seq_len_schedule=LENGTHS, **loading), callbacks=[lengths], max_steps=14, **options)
    assert len({step for step, _ in lengths.seen}) == 14
    for step, tokens in lengths.seen:
        assert tokens.shape == (8 // wanted(step), wanted(step)), step


def test_the_tokens_are_those_without_a_schedule(file):
    with_one, without = Lengths(), Lengths()
    run(data(file, seq_len_schedule=LENGTHS), callbacks=[with_one], max_steps=14)
    run(data(file), callbacks=[without], max_steps=14)
    for (_, short), (_, whole) in zip(with_one.seen, without.seen, strict=True):
        assert torch.equal(short.flatten(), whole.flatten())


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 11])
@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_goes_on_in_it(file, tmp_path, stop, every):
    whole, rest = Lengths(), Lengths()
    options = {"max_steps": 13, "accumulate_grad_batches": every}
    run(data(file, seq_len_schedule=LENGTHS), callbacks=[whole, every_step(tmp_path)], **options)
    ckpt = tmp_path / f"step={stop}.ckpt"
    run(data(file, seq_len_schedule=LENGTHS), ckpt, callbacks=[rest], **options)
    after = [tokens for step, tokens in whole.seen if step >= stop]
    assert len(after) == len(rest.seen)
    for tokens, (step, found) in zip(after, rest.seen, strict=True):
        assert torch.equal(tokens, found), step


def test_a_checkpoint_within_a_step(file, tmp_path):
    """Of two accumulated batches the second is still to come: it ends the step, and the next step's length follows."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    options = {"accumulate_grad_batches": 2, "max_steps": 3}
    lengths = Lengths()
    run(data(file, seq_len_schedule={0: 1, 1: 4}), callbacks=[Save()], **options)
    run(data(file, seq_len_schedule={0: 1, 1: 4}), tmp_path / "half.ckpt", callbacks=[lengths], **options)
    assert [(step, tokens.shape[1]) for step, tokens in lengths.seen] == [(0, 1), (1, 4), (1, 4), (2, 4)]


def test_another_schedule_is_said(file, tmp_path):
    run(data(file, seq_len_schedule={0: 2, 4: 4}), callbacks=[every_step(tmp_path)], max_steps=2)
    lengths = Lengths()
    with pytest.warns(
        UserWarning, match=r"written with data.seq_len_schedule \{0: 2, 4: 4\}; .* goes on with \{0: 4\}"
    ):
        run(data(file, seq_len_schedule={0: 4}), tmp_path / "step=2.ckpt", callbacks=[lengths], max_steps=3)
    assert lengths.seen[0][1].shape == (2, 4)


def test_validation_has_whole_sequences(file):
    module = data(file, seq_len_schedule={0: 1, 3: 4})
    module.setup("fit")
    assert next(iter(module.val_dataloader()))["tokens"].shape == (1, 4)
    assert next(iter(module.train_dataloader()))["tokens"].shape == (8, 1)


def test_steps_that_a_module_takes_itself_are_refused(file):
    class Own(Recorder):
        automatic_optimization = False

    model = Own()
    model.automatic_optimization = False
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0
    )
    with pytest.raises(ValueError, match="Own takes by itself"):
        trainer.fit(model, data(file, seq_len_schedule={0: 4}))


@pytest.mark.parametrize(
    "schedule, says",
    [
        ([4], r"must be a mapping .*got \[4\]"),
        ({}, "starts at step None"),
        ({1: 4}, "starts at step 1"),
        ({-1: 2, 0: 4}, "starts at step -1"),
        ({0: 3, 5: 4}, "sequences of 3 tokens, which do not divide data.seq_len = 4"),
        ({0: 0, 5: 4}, "sequences of 0 tokens"),
        ({0: 2}, "ends with sequences of 2 tokens, but validation uses data.seq_len = 4"),
        ({0: 8}, "sequences of 8 tokens"),
        ({0: 2.0, 1: 4}, "must be an integer, got 2.0"),
        ({True: 2, 3: 4}, "must be an integer, got the bool True"),
    ],
)
def test_bad_schedules(file, schedule, says):
    with pytest.raises((TypeError, ValueError), match=says):
        ByteDataModule(file, seq_len=4, seq_len_schedule=schedule)


def genome(folder):
    letters = np.random.default_rng(0).choice(list("ACGTN"), 400, p=[0.24, 0.24, 0.24, 0.24, 0.04])
    (folder / "g.fa").write_text(">a\n" + "".join(letters) + "\n")
    settings = {"val_fraction": 0.2, "test_fraction": 0, "n_policy": "token", "cache_dir": str(folder)}
    return GenomeDataModule(str(folder / "g.fa"), 24, 2, seq_len_schedule={0: 6, 3: 24}, **settings)


def tokens(folder):
    np.random.default_rng(0).integers(0, 50, 800).astype(np.uint16).tofile(folder / "t.bin")
    return TokenDataModule(str(folder / "t.bin"), 24, 50, 2, seq_len_schedule={0: 8, 3: 24})


@pytest.mark.parametrize("make", [genome, tokens])
def test_rows_are_cut_from_the_sample(tmp_path, make):
    module = make(tmp_path)
    loader = module.train_dataloader()
    short, n = module.dataset("train"), module.schedule.at(0)
    batch = next(iter(loader))
    assert batch["tokens"].shape == batch["labels"].shape == (2 * 24 // n, n)
    for row, index in enumerate(batch["index"].tolist()):
        sample, start = short[index], row % (24 // n) * n
        assert torch.equal(batch["tokens"][row], sample["tokens"][start : start + n])
        assert torch.equal(batch["labels"][row], sample["labels"][start : start + n])


def documents(folder):
    values = np.random.default_rng(0).integers(0, 9, 800).astype(np.uint16)
    values.tofile(folder / "t.bin")
    return TokenDataModule(str(folder / "t.bin"), 24, 9, eos_token=3, seq_len_schedule={0: 8, 3: 24})


def test_packed_documents_are_cut_where_a_sequence_ends(tmp_path):
    module = documents(tmp_path)
    for number, batch in zip(range(5), module.train_dataloader(), strict=False):  # 5 batches: 3 of 8, then of 24 tokens
        plain = module.dataset("train")[int(batch["index"])]
        walls = {0, 8, 16, 24} if number < 3 else {0, 24}
        assert set(batch["cu_seqlens"].tolist()) == walls | set(plain["cu_seqlens"].tolist())
        assert batch["cu_seqlens"].dtype == torch.int32 and torch.equal(batch["tokens"][0], plain["tokens"])
        assert torch.equal(batch["labels"][0], plain["labels"])


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_rank_reads_its_part_of_each_row(tmp_path_factory, data):
    """Of any layout, also where rows have fewer tokens than there are ranks, and of packed documents."""
    folder = tmp_path_factory.mktemp("rows")
    module = data.draw(st.sampled_from([tokens, documents, genome]))(folder)
    n = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
    scheduled = ScheduledSequences(module.dataset("train"), SeqLenSchedule({0: n, 5: 24}, 24))
    ranks = data.draw(st.integers(1, 5))
    layout = data.draw(st.sampled_from(["contiguous", "zigzag", "strided"]))
    collate = module.collate or collate_rows
    samples = [(index, n) for index in ([3] if module.collate else [3, 0])]
    whole = collate([scheduled[sample] for sample in samples])
    for rank in range(ranks):
        place = Place(ranks, rank, layout)
        found = collate(RankDataset(scheduled, place).__getitems__(samples))
        want = SequenceSpec({"tokens": 1, "labels": 1}, ["index", "cu_seqlens"]).cut(whole, place)
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(found[name], value), name
