"""Windows of a genome: both strands, ranges, the reads of a rank, and augmentation by sample and epoch."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated.data import GenomeDataModule, ResumableLoader, ResumableSampler
from lightning_dilated.ext.genomes.fasta import GenomeWindows
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

from ...data.runs import every_step, run

N = 12


def bases(path: str) -> str:
    return "".join(Path(path).read_text().split("\n")[1:])


def other_strand(text: str) -> str:
    return text[::-1].translate(str.maketrans("ACGT", "TGCA"))


def codes(text: str) -> list[int]:
    return ["ACGTN".index(base) for base in text]


def windows(path: str, share: float, **options) -> GenomeWindows:
    settings = {"seq_len": N, "val_fraction": 0.1, "test_fraction": 0, "reverse_complement": share, **options}
    return GenomeDataModule(path, **settings).dataset("train")


def test_the_other_strand_of_a_window(lambda_virus: str) -> None:
    """The other strand has complementary bases. Labels are the next bases on that strand, to the left in the file."""
    text, data = bases(lambda_virus), windows(lambda_virus, 1.0, seq_len=50)
    for index in (0, 1, 17, len(data) - 1):
        start = index * 50
        expected = codes(other_strand(text[start : start + 50]))
        before = codes(other_strand(text[start - 1])) if start else [-100]  # no label: the record begins here
        assert data[index]["tokens"].tolist() == expected
        assert data[index]["labels"].tolist() == expected[1:] + before


def test_labels_stay_in_their_split(lambda_virus: str) -> None:
    text = bases(lambda_virus)
    settings = {"seq_len": 48502 // 2, "val_fraction": 0.5, "test_fraction": 0}
    data = GenomeDataModule(lambda_virus, reverse_complement=0, **settings)
    assert data.dataset("train")[0]["labels"][-1] == data.dataset("val")[0]["labels"][-1] == -100
    assert data.dataset("val")[0]["tokens"].tolist() == codes(text[24251:])
    flipped = GenomeWindows(data.genome, [(0, 24251, 48502)], 24251, reverse_complement=1.0)
    assert flipped[0]["labels"][-1] == -100 and flipped[0]["tokens"].tolist() == codes(other_strand(text[24251:]))


def test_which_windows_are_reversed(lambda_virus: str) -> None:
    data = windows(lambda_virus, 0.3)
    count = len(data)

    def drawn(epoch: int, **options) -> np.ndarray:
        module = windows(lambda_virus, **{"share": 0.3, **options})
        module.set_epoch(epoch)
        torch.manual_seed(epoch)  # the state of torch's generator has no effect
        return np.array([module.reversed(i) for i in range(count)])

    first = drawn(0)
    assert (first == drawn(0)).all() and abs(first.mean() - 0.3) < 4 * np.sqrt(0.21 / count)
    for other in (drawn(1), drawn(0, seed=1)):  # independent of the first draw
        assert abs((first & other).mean() - 0.09) < 4 * np.sqrt(0.09 * 0.91 / count)
    assert not drawn(0, share=0.0).any() and drawn(0, share=1.0).all()


def test_evaluation_is_not_augmented(lambda_virus: str) -> None:
    data = GenomeDataModule(lambda_virus, seq_len=100, reverse_complement=1.0)
    for split in ("val", "test"):
        dataset = data.dataset(split)
        assert not any(dataset.reversed(i) for i in range(len(dataset))) and len(dataset) == 24


RANGES = [(range(0, 30),), (range(20, 40), range(60, 100)), (range(1, 100, 4),), (range(99, 100),), (range(5, 5),), ()]


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("ranges", RANGES)
def test_range_reads_equal_whole_ones(lambda_virus: str, ranges: tuple[range, ...], share: float) -> None:
    data, at = windows(lambda_virus, share, seq_len=100), [p for r in ranges for p in r]
    for index in (0, 3, len(data) - 1):
        full, got = data[index], data.read_ranges(index, ranges)
        assert torch.equal(got["tokens"], full["tokens"][at]) and torch.equal(got["labels"], full["labels"][at])
        assert got["tokens"].dtype == got["labels"].dtype == torch.int64


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_slice(lambda_virus: str, touched, ranks: int, layout: str, share: float) -> None:
    """A rank reads only its slice. Bytes are counted when they are copied out of the memory map, with line ends."""
    data = windows(lambda_virus, share, seq_len=4200)
    touched.take()
    whole, parts = data[3], []
    assert touched.count() == 4201 + 4200 // 70  # one base more for the last label, and a line end every 70 bases
    for rank in range(ranks):
        place = Place(ranks, rank, layout)
        parts.append(RankDataset(data, place)[3])
        stretches, ranges = touched.take(), place.ranges(4200)
        assert len(stretches) == len(ranges)
        for (_, start, stop), positions in zip(stretches, ranges, strict=True):
            assert len(positions) + 1 <= stop - start <= (len(positions) + 1) * 71 / 70 + 1
    at = [p for rank in range(ranks) for r in Place(ranks, rank, layout).ranges(4200) for p in r]
    for name in ("tokens", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name][at])


def test_the_epoch_reaches_the_windows_of_a_rank(lambda_virus: str) -> None:
    data = windows(lambda_virus, 0.5, seq_len=1000)
    sharded, samples = RankDataset(data, Place(2, 1)), []
    for epoch in (0, 1):
        loader = ResumableLoader(sharded, sampler=ResumableSampler(sharded, shuffle=False))
        loader.sampler.set_epoch(epoch)
        samples.append([batch["tokens"].tolist() for batch in loader])
        expected = [[RankDataset(data, Place(2, 1))[i]["tokens"].tolist()] for i in range(len(data))]
        assert data.epoch == epoch and samples[-1] == expected
    assert samples[0] != samples[1]


def test_windows_outside(lambda_virus: str) -> None:
    data = GenomeDataModule(lambda_virus, seq_len=1000, val_limit=1)
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"window {index} was asked for, but there are 1"):
            data.dataset("val")[index]
    with pytest.raises(IndexError, match=r"bases \[0, 48503\) lie outside gi.*, which has 48502"):
        data.genome.read(0, 0, 48503)


def test_a_changed_file_is_noticed(lambda_virus: str) -> None:
    data = windows(lambda_virus, 0.0)
    path = Path(lambda_virus)
    path.write_text(path.read_text().replace("GGGCGGCGACCT", "GGGCGG\nGACCT"))  # the file keeps its size
    with pytest.raises(ValueError, match="changed since it was indexed"):
        data[0]


def test_workers_read_the_same(lambda_virus: str) -> None:
    """The epoch also reaches worker processes, which are forked or unpickle the dataset."""
    data = windows(lambda_virus, 0.5, seq_len=1000)
    data.set_epoch(5)
    alone = list(DataLoader(data, batch_size=8))
    for left, right in zip(alone, DataLoader(data, batch_size=8, num_workers=2), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    copy = pickle.loads(pickle.dumps(data))
    assert all(torch.equal(copy[i]["tokens"], data[i]["tokens"]) for i in range(len(data)))


# -- epochs, in a Trainer ----------------------------------------------------------------------------------------------
class MarkReversed:
    """Collates samples, and changes each index to 2 * index + (1 if its window is reversed)."""

    def __init__(self, forward: set[tuple[int, ...]]) -> None:
        self.forward = forward

    def __call__(self, samples: list[dict]) -> dict:
        batch = torch.utils.data.default_collate(samples)
        came = [tuple(tokens[:40].tolist()) not in self.forward for tokens in batch["tokens"]]
        return {**batch, "index": 2 * batch["index"] + torch.tensor(came)}


def strands(path: str, workers: int = 0, **options) -> list[tuple[int, bool]]:
    """Return (window, reversed) in the order of a run over 11 windows. An epoch uses 10 of them."""
    settings = {"seq_len": 4400, "val_fraction": 0, "test_fraction": 0, "batch_size": 2, "seed": 3}
    module = GenomeDataModule(path, num_workers=workers, **settings)
    forward = GenomeDataModule(path, reverse_complement=0, **settings).dataset("train")
    module.collate = MarkReversed({tuple(forward[i]["tokens"][:40].tolist()) for i in range(11)})
    model, _ = run(module, **options)
    return [(index // 2, bool(index % 2)) for index in model.samples()]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_epoch_draws_anew_and_a_resumed_run_goes_on(lambda_virus: str, tmp_path: Path, workers: int) -> None:
    whole = strands(lambda_virus, workers, max_epochs=3, callbacks=[every_step(tmp_path)])
    data = windows(lambda_virus, 0.5, seq_len=4400, val_fraction=0, seed=3)
    for at, (index, flipped) in enumerate(whole):
        data.set_epoch(at // 10)
        assert flipped == data.reversed(index)
    assert len(whole) == 30 and 5 < sum(flipped for _, flipped in whole) < 25
    resumed = strands(lambda_virus, ckpt=tmp_path / "step=7.ckpt", max_epochs=3)
    assert resumed == whole[14:]
