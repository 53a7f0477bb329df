"""Packs of samples: their contents, equal packs on any number of ranks, and runs that stop and resume."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import Dataset

from lightning_dilated import SequenceSpec
from lightning_dilated.data import ByteDataModule, GenomeDataModule, SlideDataModule, TokenDataModule
from lightning_dilated.data.module import SplitDataModule
from lightning_dilated.data.packing import PackedSamples, PackingSampler, collate_pack, pack_bounds
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

from ..models import trainer
from .runs import Recorder, every_step, run

EOS = 9


def packs(dataset, budget, ranks=1, rank=0, consumed=0, **options):
    sampler = PackingSampler(PackedSamples(dataset, budget), ranks, rank, **options)
    sampler.restore(options.pop("epoch", 0), consumed)
    return list(sampler)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 20), st.data())
def test_packs_are_filled_in_order(lengths, budget, drawn):
    bounds = pack_bounds(np.array(lengths), budget).tolist()
    assert bounds[0] == 0 and bounds[-1] == len(lengths)
    for a, b in itertools.pairwise(bounds):
        assert b > a and (sum(lengths[a:b]) <= budget or b == a + 1)
        if b < len(lengths):
            assert sum(lengths[a : b + 1]) > budget
    at = drawn.draw(st.integers(0, len(bounds) - 1))
    assert pack_bounds(np.array(lengths), budget, bounds[at]).tolist() == bounds[at:]


def documents(folder: Path, sizes=(5, 2, 17, 9, 3, 30, 8, 1, 6, 12, 4, 4), **options) -> TokenDataModule:
    rng = np.random.default_rng(0)
    parts = [np.append(rng.integers(0, EOS, n - 1), EOS) for n in sizes]
    np.save(folder / "tokens.npy", np.concatenate(parts).astype(np.uint16))
    settings = {"seq_len": 12, "vocab_size": 10, "eos_token": EOS, "val_fraction": 0, "test_fraction": 0, "seed": 3}
    return TokenDataModule(str(folder / "tokens.npy"), **{**settings, "pack_tokens": 16, **options})


@pytest.mark.parametrize("consumed_packs", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_packs_of_one(tmp_path, ranks, consumed_packs):
    data = documents(tmp_path).dataset("train")
    one = packs(data, 16)
    assert sorted(i for pack in one for i in pack) == list(range(len(data)))
    consumed = sum(map(len, one[:consumed_packs]))
    for drop_last in (False, True):
        each = [packs(data, 16, ranks, rank, consumed, drop_last=drop_last) for rank in range(ranks)]
        dealt = [pack for round in itertools.zip_longest(*each) for pack in round if pack is not None]
        remaining = one[consumed_packs:]
        assert dealt == (remaining[: len(remaining) // ranks * ranks] if drop_last else remaining)
        sampler = PackingSampler(PackedSamples(data, 16), ranks, 0, drop_last=drop_last)
        assert len(sampler) == (len(one) // ranks if drop_last else -(-len(one) // ranks))


def test_documents_are_whole(tmp_path):
    """Long documents become pieces of seq_len tokens. The label of a token is the next one in its document."""
    module = documents(tmp_path)
    tokens = np.load(tmp_path / "tokens.npy").astype(int)
    data = module.dataset("train")
    # lengths: 17 = 12 + 5; 30 = 12 + 12 + 6; a document of 1 token has no label and is omitted
    assert data.lengths.tolist() == [5, 2, 12, 5, 9, 3, 12, 12, 6, 8, 6, 12, 4, 4]
    for i in range(len(data)):
        sample, begin = data[i], int(data.begins[i])
        n = data.length_of(i)
        assert sample["tokens"].tolist() == tokens[begin : begin + n].tolist()
        ended = sample["tokens"] == EOS
        assert ended.sum() <= 1 and (sample["labels"][ended] == -100).all()
        assert sample["labels"][~ended].tolist() == tokens[begin + 1 : begin + 1 + n][: int((~ended).sum())].tolist()
    assert "documents of up to 12" in module.describe()


def test_files_are_documents_of_bytes(tmp_path):
    for i, size in enumerate((7, 20, 1, 4)):
        (tmp_path / f"{i}.txt").write_bytes(bytes(range(10 * i, 10 * i + size)))
    module = ByteDataModule(str(tmp_path), seq_len=8, val_fraction=0, test_fraction=0, pack_tokens=16)
    data = module.dataset("train")
    assert data.lengths.tolist() == [7, 8, 8, 4, 4]
    (_, batch), *_ = enumerate(module.train_dataloader())
    assert batch["tokens"].shape == (1, batch["cu_seqlens"][-1]) and batch["index"].shape == (
        len(batch["cu_seqlens"]) - 1,
    )
    assert data[3]["labels"].tolist() == [27, 28, 29, -100] and data[3]["tokens"].tolist() == [26, 27, 28, 29]
    assert module.bigram_bits_per_byte("train") > 0


def test_genomes_have_short_records_and_rests(tmp_path):
    rng = np.random.default_rng(1)
    records = {f"r{i}": "".join(rng.choice(list("ACGT"), n)) for i, n in enumerate((25, 4, 10, 21, 1))}
    (tmp_path / "g.fa").write_text("".join(f">{name}\n{bases}\n" for name, bases in records.items()))
    options = {"seq_len": 10, "val_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="shorter than two bases: set"):
        GenomeDataModule(str(tmp_path / "g.fa"), pack_tokens=20, **options).check()
    module = GenomeDataModule(str(tmp_path / "g.fa"), pack_tokens=20, short="skip", reverse_complement=1, **options)
    data = module.dataset("train")
    assert data.lengths.tolist() == [10, 10, 5, 4, 10, 10, 10]
    assert [data.length_of(i) for i in range(7)] == data.lengths.tolist()
    flip = dict(zip("ACGT", (3, 2, 1, 0), strict=True))
    assert data[2]["tokens"].tolist() == [flip[x] for x in reversed(records["r0"][20:])]
    # on the reverse strand, the label of the last base is the base before the window
    assert data[2]["labels"].tolist() == [flip[x] for x in reversed(records["r0"][19:24])]
    assert data[3]["labels"].tolist() == [*(flip[x] for x in reversed(records["r1"][:3])), -100]
    # the last of 21 bases is only a label, and a record of 1 base is omitted
    assert "2 bases lie in no window" in module.describe()
    whole = GenomeDataModule(str(tmp_path / "g.fa"), short="skip", **options)
    assert len(whole.dataset("train")) == 5


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "strided"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_part(folder, tmp_path, ranks, layout):
    slides = SlideDataModule(folder, f"{folder}/labels.csv", val_fraction=0, test_fraction=0).dataset("train")
    tokens = SequenceSpec({"tokens": 1, "labels": 1}, whole=["cu_seqlens", "index"])
    for data, spec in ((slides, SlideDataModule.sequence_spec), (documents(tmp_path).dataset("train"), tokens)):
        packed = PackedSamples(data, 64)
        for pack in [(3, 0, 7), (5,), tuple(range(8))]:
            whole = collate_pack([packed[pack]])
            for rank in range(ranks):
                place = Place(ranks, rank, layout)
                part = collate_pack(RankDataset(packed, place).__getitems__([pack]))
                want = spec.cut(whole, place)
                assert part.keys() == want.keys()
                for name, value in want.items():
                    assert torch.equal(part[name], value) if isinstance(value, torch.Tensor) else part[name] == value


def test_packed_slides_hold_the_padded_ones(folder):
    options = {"labels_csv": f"{folder}/labels.csv", "val_fraction": 0, "test_fraction": 0, "pack_tokens": 60}
    module = SlideDataModule(folder, **options)
    indices = []
    for batch in module.train_dataloader():
        bounds = batch["cu_seqlens"]
        assert bounds.dtype == torch.int32 and bounds[-1] == batch["features"].shape[1] <= 60
        assert (batch["coords"][0, bounds[:-1].long()] == -1).all() and "lengths" not in batch
        for i, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
            sample = module.dataset("train")[int(batch["index"][i])]
            assert torch.equal(batch["features"][0, a:b], sample["features"])
            assert (batch["label"][i], batch["slide_id"][i]) == (sample["label"], sample["slide_id"])
        indices += batch["index"].tolist()
    assert sorted(indices) == list(range(12)) and len(module.train_dataloader()) < 12


class Marked(Dataset):
    """Samples of 2, 4 and 3 tokens, each with a mask over its tokens and a vector."""

    lengths = np.array([2, 4, 3])

    def __len__(self):
        return 3

    def read_ranges(self, index, ranges):
        at = torch.tensor([p for x in ranges for p in x], dtype=torch.int64)
        return {"tokens": at + 10 * index, "mask": at % 2 == 0, "age": torch.tensor([index, 1]), "index": index}


class MarkedModule(SplitDataModule):
    along = (*SplitDataModule.along, "mask")

    def check(self):
        pass

    def dataset(self, split):
        return Marked()


def test_a_subclass_says_what_runs_over_the_tokens():
    module = MarkedModule(pack_tokens=9)
    (batch,) = module.train_dataloader()
    for i, (a, b) in enumerate(itertools.pairwise(batch["cu_seqlens"].tolist())):
        want = Marked().read_ranges(int(batch["index"][i]), (range(b - a),))
        assert torch.equal(batch["mask"][0, a:b], want["mask"]) and torch.equal(batch["tokens"][0, a:b], want["tokens"])
        assert torch.equal(batch["age"][i], want["age"])
    module.along = SplitDataModule.along
    with pytest.raises(ValueError, match=r"'mask' of the shapes \[\(2,\), \(3,\), \(4,\)\].*DataModule's `along`"):
        next(iter(module.train_dataloader()))


def test_a_long_slide_is_a_batch_by_itself(folder):
    module = SlideDataModule(folder, val_fraction=0, test_fraction=0, pack_tokens=10)
    batches = list(module.train_dataloader())
    longer = [x for x in batches if x["features"].shape[1] > 10]
    assert longer and all(len(x["index"]) == 1 for x in longer)
    assert sorted(i for x in batches for i in x["index"].tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 2}, "leave data.batch_size at 1"),
        ({"pack_tokens": 11}, "data.pack_tokens is 11, below data.seq_len = 12"),
        ({"pack_tokens": 0}, "data.pack_tokens"),
        ({"eos_token": None}, "packs documents, but data.eos_token"),
    ],
)
def test_refused(tmp_path, options, error):
    with pytest.raises(ValueError, match=error):
        documents(tmp_path, **options)


def test_more_ranks_than_packs(tmp_path):
    module = documents(tmp_path, sizes=(4, 4, 4))
    module._replica = lambda: (0, 3)
    with pytest.raises(ValueError, match="= 16 packs into fewer batches than"):
        module.train_dataloader()
    with pytest.raises(ValueError, match="no document of two or more"):
        documents(tmp_path, sizes=(1, 1)).check()


@pytest.mark.parametrize(("before", "batches", "after"), [(2, 2, 1), (1, 2, 2), (3, 1, 2)])
def test_a_position_is_taken_over_by_other_ranks(tmp_path, before, batches, after):
    """The packs that the old ranks used are the first packs of the epoch. The new ranks continue after them."""

    def loaders(ranks):
        created = []
        for rank in range(ranks):
            module = documents(tmp_path)
            module._replica = lambda rank=rank: (rank, ranks)
            created.append(module.train_dataloader())
        return created

    def served(loader, count=None):
        return [tuple(batch["index"].tolist()) for batch in itertools.islice(loader, count)]

    whole = served(loaders(1)[0])
    first = [(loader, served(loader, batches)) for loader in loaders(before)]
    used = [pack for step in zip(*(packs for _, packs in first), strict=True) for pack in step]
    states = [loader.state_dict() for loader, _ in first]
    assert used == whole[: batches * before] and all(state == states[0] for state in states)
    remaining = []
    for loader in loaders(after):
        loader.load_state_dict(states[0])
        remaining.append(served(loader))
    want = whole[batches * before :]
    assert [pack for step in zip(*remaining, strict=True) for pack in step] == want[: len(want) // after * after]


# -- runs --------------------------------------------------------------------------------------------------------------
def epochs(data, budget=16, seed=3):
    """Yield the packs of one epoch after another, forever."""
    for epoch in itertools.count():
        sampler = PackingSampler(PackedSamples(data, budget), seed=seed)
        sampler.restore(epoch, 0)
        yield list(sampler)


def test_each_epoch_has_its_own_number_of_batches(tmp_path):
    """Lightning reads the loader's length only once. If it stayed fixed, samples or a validation would be skipped."""
    module = documents(tmp_path, val_fraction=0.2)
    data = module.dataset("train")
    want = list(itertools.islice(epochs(data), 6))
    assert len({len(x) for x in want}) > 1
    model, _ = run(module, max_epochs=6)
    assert [x for _, x in model.seen] == [pack for epoch in want for pack in epoch]
    assert [i for i, _ in model.seen] == [i for epoch in want for i in range(len(epoch))]
    assert model.validated_after == list(itertools.accumulate(len(epoch) for epoch in want))
    halves, _ = run(module, max_epochs=3, val_check_interval=0.5)
    assert len(halves.validated_after) == 6


@pytest.mark.parametrize(
    "workers, ask_for_steps",
    [(0, False), (2, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((0, True), (2, False)))],
)
def test_a_run_goes_on_where_it_stopped(tmp_path, workers, ask_for_steps):
    whole, _ = run(documents(tmp_path, val_fraction=0.2), callbacks=[every_step(tmp_path)], max_epochs=4)
    steps = range(1, len(whole.seen)) if workers == 0 else (3, 9)
    for step in steps:
        module = documents(tmp_path, val_fraction=0.2, num_workers=workers)
        resumed, _ = run(module, tmp_path / f"step={step}.ckpt", ask_for_steps=ask_for_steps, max_epochs=4)
        assert resumed.seen == whole.seen[step:], step
        assert resumed.validated_after == [x for x in whole.validated_after if x > step]


def test_from_the_ends_of_epochs_and_after_a_crash(tmp_path):
    ends = ModelCheckpoint(tmp_path, filename="end-{epoch}", save_top_k=-1)
    whole, _ = run(documents(tmp_path, val_fraction=0.2), callbacks=[ends], max_epochs=5)
    sizes = [
        len(epoch) for epoch in itertools.islice(epochs(documents(tmp_path, val_fraction=0.2).dataset("train")), 5)
    ]
    for epoch in range(4):
        resumed, _ = run(documents(tmp_path, val_fraction=0.2), tmp_path / f"end-epoch={epoch}.ckpt", max_epochs=5)
        assert resumed.seen == whole.seen[sum(sizes[: epoch + 1]) :]
    for crash in (2, sizes[0], sizes[0] + 1):
        with pytest.raises(KeyError, match="crash"):
            callbacks = [OnExceptionCheckpoint(tmp_path, filename=f"crash{crash}")]
            run(documents(tmp_path, val_fraction=0.2), callbacks=callbacks, crash_at=crash, max_epochs=5)
        resumed, _ = run(documents(tmp_path, val_fraction=0.2), tmp_path / f"crash{crash}.ckpt", max_epochs=5)
        assert resumed.seen == whole.seen[crash:]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_limited_epochs(tmp_path, step):
    options = {"max_epochs": 3, "limit_train_batches": 3}
    whole, _ = run(documents(tmp_path), callbacks=[every_step(tmp_path)], **options)
    want = [pack for epoch in itertools.islice(epochs(documents(tmp_path).dataset("train")), 3) for pack in epoch[:3]]
    assert [x for _, x in whole.seen] == want
    resumed, _ = run(documents(tmp_path), tmp_path / f"step={step}.ckpt", **options)
    assert resumed.seen == whole.seen[step:]


@pytest.mark.parametrize("budget", [12, 40])
@pytest.mark.parametrize("step", [1, 3])
def test_another_budget_serves_each_sample_once(tmp_path, step, budget):
    whole, _ = run(documents(tmp_path), callbacks=[every_step(tmp_path)], max_epochs=2)
    used = [i for _, pack in whole.seen[:step] for i in pack]
    resumed, trainer = run(documents(tmp_path, pack_tokens=budget), tmp_path / f"step={step}.ckpt", max_epochs=2)
    count = len(documents(tmp_path).dataset("train"))
    remaining = resumed.samples()[: count - len(used)]
    assert sorted(used + remaining) == list(range(count))
    assert len(resumed.samples()) == 2 * count - len(used) and trainer.current_epoch == 2


class Predicts(Recorder):
    def predict_step(self, batch, batch_idx):
        return batch["index"]


def test_evaluation_and_prediction_serve_everything(tmp_path):
    module = documents(tmp_path, test_fraction=0.5)
    out = trainer().predict(Predicts(), module)
    assert torch.cat(out).tolist() == list(range(len(module.dataset("test"))))
    assert len(out) == len(module.test_dataloader()) < len(module.dataset("test"))
