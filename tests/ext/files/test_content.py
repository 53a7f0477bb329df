"""Fingerprints of content: a resumed run notices files that have the same names and sizes but other content."""

import os
import re
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.data import ByteDataModule, GenomeDataModule, SlideDataModule, TokenDataModule, write_attention
from lightning_dilated.data.module import SplitDataModule
from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.files.files import BLOCK, BLOCKS, block_starts, files_digest, spread

from ..slides.test_slides import grid, write

OPTIONS = {"val_fraction": 0, "test_fraction": 0}


def some_bytes(folder: Path, seed: int) -> ByteDataModule:
    (folder / "a.txt").write_bytes(np.random.default_rng(seed).bytes(1000))
    return ByteDataModule(str(folder / "a.txt"), seq_len=10, **OPTIONS)


def some_tokens(folder: Path, seed: int) -> TokenDataModule:
    np.save(folder / "a.npy", np.random.default_rng(seed).integers(0, 50, 1000).astype(np.uint16))
    return TokenDataModule(str(folder / "a.npy"), 10, 50, **OPTIONS)


def documents(folder: Path, seed: int) -> TokenDataModule:
    tokens = np.random.default_rng(seed).integers(1, 50, 1000).astype(np.uint16)
    tokens[::100] = 0
    tokens.tofile(folder / "a.bin")
    return TokenDataModule(str(folder / "a.bin"), 10, 50, eos_token=0, **OPTIONS)


def genome(folder: Path, seed: int) -> GenomeDataModule:
    letters = "".join("ACGT"[i] for i in np.random.default_rng(seed).integers(0, 4, 1000))
    (folder / "a.fa").write_text(f">a\n{letters}\n")
    return GenomeDataModule(str(folder / "a.fa"), 10, **OPTIONS)


def slides(
    folder: Path, seed: int, what: str = "features", kind: str = "h5", order: str | None = None
) -> SlideDataModule:
    for i in range(3):
        rng = np.random.default_rng([seed if what == "features" else 0, i])
        x, c = rng.standard_normal((20, 3)).astype(np.float32), grid(20) + (256 * seed if what == "coords" else 0)
        if kind == "h5":
            write(folder / f"s{i}.h5", x, c, patch_size_level0=256)
        else:
            torch.save({"features": torch.from_numpy(x).bfloat16(), "coords": torch.from_numpy(c)}, folder / f"s{i}.pt")
    return SlideDataModule(str(folder), order=order, **OPTIONS)


KINDS = {
    "bytes": some_bytes,
    "tokens": some_tokens,
    "documents": documents,
    "genome": genome,
    "features": slides,
    "coords": lambda folder, seed: slides(folder, seed, "coords"),
    "features of .pt": lambda folder, seed: slides(folder, seed, kind="pt"),
}


def state_of(module: SplitDataModule) -> dict:
    loader = module.train_dataloader()
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize("name", KINDS)
def test_equal_sizes_with_other_content_are_refused(tmp_path, name):
    make = KINDS[name]
    state = state_of(make(tmp_path, 0))
    make(tmp_path, 0).train_dataloader().load_state_dict(state)  # rewritten with the same content
    (tmp_path / "b").mkdir()
    sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    other = make(tmp_path, 1).train_dataloader()
    assert {p.name: p.stat().st_size for p in tmp_path.iterdir()} == sizes
    with pytest.raises(ValueError, match=r"was written with fingerprint = .*files with the same names and content"):
        other.load_state_dict(state)


@pytest.mark.parametrize("name", ["bytes", "tokens", "features"])
def test_checkpoints_that_tell_of_names_and_sizes_only(tmp_path, name):
    """Earlier versions stored names and sizes only. These are compared, and a warning says that content is not."""
    make = KINDS[name]
    state = state_of(make(tmp_path, 0))
    early = {**state, "fingerprint": state["fingerprint"].split(MARK)[0]}
    assert early != state
    with pytest.warns(UserWarning, match="covers names and sizes only"):
        make(tmp_path, 1).train_dataloader().load_state_dict(early)
    with pytest.raises(ValueError, match="was written with fingerprint = x"):
        make(tmp_path, 0).train_dataloader().load_state_dict({**early, "fingerprint": "x"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path, 0).train_dataloader().load_state_dict(state)


def test_the_first_part_is_that_of_earlier_versions(tmp_path):
    """The expected values were recorded before fingerprints included the content."""
    fingerprint = some_bytes(tmp_path, 0).dataset("train").fingerprint()
    assert re.fullmatch(r"16009a3b5dc805b6, 99 sequences from byte 0; content [0-9a-f]{16}", fingerprint)
    in_files = slides(tmp_path, 0, order="file")  # the default order of that version
    assert in_files.dataset("train").fingerprint().startswith("0195a3979bc34a0e; content ")


def test_attention_written_into_a_slide_changes_nothing(tmp_path):
    before = slides(tmp_path, 0).dataset("train").fingerprint()
    write_attention(tmp_path / "s1.h5", np.ones(20), grid(20))
    with h5py.File(tmp_path / "s1.h5") as file:
        assert "attention" in file
    assert SlideDataModule(str(tmp_path), **OPTIONS).dataset("train").fingerprint() == before


def test_a_large_file_is_looked_at_in_blocks(tmp_path):
    path, size = tmp_path / "a", 100 * BLOCK + 17
    path.write_bytes(bytes(size))
    before, noticed = files_digest([str(path)]), 0
    for at in (0, BLOCK - 1, size - 1, size - BLOCK, *block_starts(size)):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"x")
        assert files_digest([str(path)]) != before
        path.write_bytes(bytes(size))
    read = sum(min(BLOCK, size - start) for start in block_starts(size))
    assert read == BLOCK * BLOCKS and files_digest([str(path)]) == before and not noticed


@given(st.integers(0, 20 * BLOCK * BLOCKS))
def test_blocks_begin_in_the_file_and_reach_its_end(size):
    starts = block_starts(size)
    assert len(starts) <= BLOCKS and starts == sorted(set(starts)) and all(0 <= x < size for x in starts)
    assert not size or (starts[0] == 0 and starts[-1] + BLOCK >= size)
    assert size > BLOCK * BLOCKS or sum(min(BLOCK, size - x) for x in starts) == size


@given(st.integers(0, 10_000), st.integers(2, 50))
def test_spread(count, most):
    spread_positions = spread(count, most)
    assert len(spread_positions) == min(count, most) and spread_positions == sorted(set(spread_positions))
    assert not count or (spread_positions[0] == 0 and spread_positions[-1] == count - 1)


def test_many_files_are_looked_into_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_dilated.ext.files.files.FILES", 3)
    files = [str(tmp_path / f"{i}") for i in range(9)]
    for file in files:
        Path(file).write_text("a")
    before = files_digest(files)
    for i, file in enumerate(files):
        Path(file).write_text("b")
        assert (files_digest(files) != before) == (i in (0, 4, 8))
        Path(file).write_text("a")


def test_what_is_served_is_not_what_is_sampled(tmp_path):
    """A fingerprint reads files, but `bytes_read` counts only the samples of this rank."""
    data = some_bytes(tmp_path, 0)
    data.dataset("train").fingerprint()
    assert data.stream.bytes_read == 0
    os.remove(tmp_path / "a.txt")
    assert data.dataset("train").fingerprint()  # from the cache
