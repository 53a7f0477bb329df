"""StreamDataModule: each step of a stream continues the previous step, on any number of ranks."""

import numpy as np
import pytest
import torch

from lightning_dilated.data import ResumableLoader, ResumableSampler, StreamDataModule, StreamSequences


def written(tmp_path, size=1000, seed=0, values=7):
    data = torch.randint(0, values, (size,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    (tmp_path / "text").write_bytes(data.numpy().tobytes())
    return data.long()


def module(tmp_path, seq_len=16, streams=4, **options):
    return StreamDataModule(str(tmp_path / "text"), seq_len, streams, **{"test_fraction": 0, **options})


def test_batches_go_on(tmp_path):
    """The tokens of a stream are consecutive, labels cross steps, and epochs repeat."""
    text = written(tmp_path)
    loader = module(tmp_path).train_dataloader()
    length = (950 - 1) // 4
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == length // 16
        for i, b in enumerate(batches):
            assert b["tokens"].shape == b["labels"].shape == b["starts"].shape == (4, 16)
            assert b["tokens"].dtype == b["labels"].dtype == b["stream"].dtype == torch.int64
            assert b["stream"].tolist() == [0, 1, 2, 3] and b["position"].tolist() == [16 * i] * 4
            assert b["starts"].sum() == (4 if i == 0 else 0) and b["starts"][:, 0].all() == (i == 0)
        for stream in range(4):
            begin, served = stream * length, len(batches) * 16
            for name, shift in (("tokens", 0), ("labels", 1)):
                got = torch.cat([b[name][stream] for b in batches])
                assert torch.equal(got, text[begin + shift : begin + shift + served])


def test_documents(tmp_path):
    """A document starts after each separator, even at the end of a step. The last token of a document has no label."""
    text = written(tmp_path, values=3)
    for seq_len in (1, 5, 16):
        batches = list(module(tmp_path, seq_len, 3, separator=1).train_dataloader())
        length = (950 - 1) // 3
        for stream in range(3):
            starts, labels = (torch.cat([b[x][stream] for b in batches]) for x in ("starts", "labels"))
            own = text[stream * length :][: len(starts) + 1]
            want = torch.cat([torch.tensor([True]), own[:-2] == 1])
            assert torch.equal(starts, want)
            assert torch.equal(labels, own[1:].masked_fill(own[:-1] == 1, -100))


def test_validation_has_the_last_short_step(tmp_path):
    text = written(tmp_path)
    data = module(tmp_path, streams=3, val_fraction=0.2)
    batches = list(data.val_dataloader())
    length = (200 - 1) // 3
    assert [b["tokens"].shape[1] for b in batches] == [16] * (length // 16) + [length % 16]
    got = torch.cat([b["labels"] for b in batches], 1).flatten()
    assert torch.equal(got, text[801 : 801 + 3 * length])
    assert data.test_dataloader() == []
    assert "3 streams of 266 train, 66 val" in data.describe()


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_ranks_serve_whole_streams_and_go_on(tmp_path, before, after):
    """The joined batches of R ranks equal the batches of one rank. A loader for a different R continues after them."""
    written(tmp_path)
    data = module(tmp_path, seq_len=8).dataset("train")

    def loaders(ranks):
        samplers = [ResumableSampler(data, ranks, r, shuffle=False, drop_last=True) for r in range(ranks)]
        return [ResumableLoader(data, batch_size=4 // ranks, sampler=s, drop_last=True) for s in samplers]

    def joined(step):
        rows = [(int(i), t) for b in step for i, t in zip(b["stream"], b["tokens"], strict=True)]
        return torch.stack([tokens for _, tokens in sorted(rows)])

    def served(steps):
        return [joined(step) for step in steps]

    whole = served(zip(*loaders(1), strict=True))
    first = loaders(before)
    iterators = [iter(x) for x in first]
    got = served([[next(x) for x in iterators] for _ in range(5)])
    state = first[0].state_dict()
    resumed = loaders(after)
    for loader in resumed:
        loader.load_state_dict(state)
    got += served(zip(*resumed, strict=True))
    assert len(got) == len(whole) and all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))


def test_token_files(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 1000, 500).astype(np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    data = StreamDataModule(str(tmp_path / "a.npy"), 10, 2, vocab_size=1000, val_fraction=0, test_fraction=0)
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"][1].tolist() == tokens[249:259].tolist()
    small = StreamDataModule(str(tmp_path / "a.npy"), 10, 2, vocab_size=100, val_fraction=0, test_fraction=0)
    with pytest.raises(ValueError, match=r"a.npy holds token \d+ at position"):
        next(iter(small.train_dataloader()))


def test_resuming_needs_the_same_streams(tmp_path):
    written(tmp_path)
    state = module(tmp_path).train_dataloader().state_dict()
    for other in (module(tmp_path, streams=2, seq_len=32), module(tmp_path, separator=1)):
        with pytest.raises(ValueError, match="the checkpoint was written with"):
            other.train_dataloader().load_state_dict(state)


def test_refusals(tmp_path):
    written(tmp_path)
    for options, message in [
        ({"separator": 256}, "separator must be below 256"),
        ({"dtype": "uint16"}, "set data.vocab_size"),
        ({"streams": 0}, "data.streams"),
        ({"val_fraction": 1.0}, "val_fraction"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(tmp_path, **options)
    with pytest.raises(ValueError, match=r"set data.streams to 6, or use fewer ranks"):
        module(tmp_path).per_rank(3)
    with pytest.raises(ValueError, match=r"the train split has 950 of the 1000 tokens, but a step of data.streams = 4"):
        module(tmp_path, seq_len=400).check()
    with pytest.raises(ValueError, match=r"the val split has 1 of .* raise data.val_fraction"):
        module(tmp_path, val_fraction=0.001).check()
    with pytest.raises(ValueError, match=r"split must be"):
        module(tmp_path).dataset("valid")
    with pytest.raises(IndexError, match="sample 56 was asked for"):
        module(tmp_path).dataset("train")[56]
    assert isinstance(module(tmp_path).dataset("train"), StreamSequences)
