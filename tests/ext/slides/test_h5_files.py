"""Slide files from strangers: nothing outside of the file is read, and impossible sizes are refused."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_dilated.data import SlideDataModule, write_attention
from lightning_dilated.ext.slides.files import SlideReader

from .test_slides import grid, write

HUGE = 10**11
X, C = np.ones((30, 4), np.float32), grid(30)


def other(folder: Path) -> str:
    """Write a valid file to which other files link."""
    write(folder / "other.h5", X, C)
    (folder / "raw").write_bytes(X.tobytes())
    return "other.h5"


def linked(path: Path, **options) -> None:
    with h5py.File(path, "w") as file:
        file["features"] = h5py.ExternalLink(other(path.parent), "features")
        file["coords"] = C


def linked_twice(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["group/inner"] = h5py.ExternalLink(other(path.parent), "/")
        file["features"] = h5py.SoftLink("/group/inner/features")
        file["coords"] = C


def virtual(path: Path) -> None:
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource(other(path.parent), "features", X.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("features", layout)
        file["coords"] = C


def external(path: Path) -> None:
    other(path.parent)
    with h5py.File(path, "w") as file:
        file.create_dataset("features", X.shape, "f4", external=[(str(path.parent / "raw"), 0, X.nbytes)])
        file["coords"] = C


def external_coords(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["features"] = X
        file.create_dataset("coords", C.shape, "i8", external=[("/etc/passwd", 0, C.nbytes)])


def declared(path: Path, tiles: int, width: int = 4, **options) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (tiles, width), "f4", **options)
        file.create_dataset("coords", (tiles, 2), "i8", **({"chunks": (1000, 2)} if options else {}))


def half_written(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (30, 4), "f4", chunks=(10, 4))[:20] = X[:20]
        file["coords"] = C


def looping(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["features"], file["coords"] = h5py.SoftLink("/features"), C


def expanded(path: Path) -> None:
    torch.save({"features": torch.ones(1).expand(10**12, 4), "coords": torch.from_numpy(C)}, path)


def expanded_coords(path: Path) -> None:
    torch.save({"features": torch.ones(9, 4), "coords": torch.zeros(1, 2, dtype=torch.int64).expand(9, 2)}, path)


def sparse(path: Path) -> None:
    torch.save({"features": torch.ones(30, 4).to_sparse(), "coords": torch.from_numpy(C)}, path)


def on_meta(path: Path) -> None:
    torch.save({"features": torch.ones(30, 4, device="meta"), "coords": torch.from_numpy(C)}, path)


FILES = {
    "external link": ("a.h5", linked, "'features' is an external link to other.h5: only data in the file itself is read"),
    "links to links": ("a.h5", linked_twice, "'features' is an external link to other.h5"),
    "virtual": ("a.h5", virtual, "'features' is a virtual data set, whose rows lie in .*other.h5: only data"),
    "external storage": ("a.h5", external, "'features' is kept in external storage, in .*raw: only data"),
    "external coords": ("a.h5", external_coords, "'coords' is kept in external storage, in .*passwd"),
    "a loop of links": ("a.h5", looping, "'features' is a link that leads nowhere"),
    "rows, never written": ("a.h5", lambda p: declared(p, HUGE), "the shape .100000000000, 4., .*of .* bytes does not"),
    "chunks, never written": ("a.h5", lambda p: declared(p, HUGE, chunks=(1000, 4)), "100,000,000 chunks, but the file has"),
    "large chunks": (
        "a.h5",
        lambda p: declared(p, HUGE, chunks=(2**25, 4), compression="gzip"),
        "chunks, but the file has only",
    ),
    "a wide one": ("a.h5", lambda p: declared(p, 3, HUGE), "declares the shape .3, 100000000000."),
    "half written": ("a.h5", half_written, "in 3 chunks, of which only 2 were written"),
    "expanded": ("a.pt", expanded, r"'features' declares the shape \(1000000000000, 4\), but the file holds only 1 of"),
    "expanded coords": ("a.pt", expanded_coords, "'coords' declares the shape .* holds only 2 of its 18 values"),
    "sparse": ("a.pt", sparse, "'features' is a sparse_coo tensor: save it as an ordinary tensor"),
    "meta": ("a.pt", on_meta, "'features' is a meta tensor"),
    "a fifo": ("a.h5", os.mkfifo, "is neither a regular file nor a directory"),
    "a fifo of torch": ("a.pt", os.mkfifo, "is neither a regular file nor a directory"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_refused_by_name(tmp_path, name):
    file, make, message = FILES[name]
    make(tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file.replace('.', '[.]')}:? .*{message}|{message}"):
        SlideReader().inspect(str(tmp_path / file))
    with pytest.raises(ValueError, match=message):
        SlideDataModule(str(tmp_path / file), val_fraction=0, test_fraction=0).check()


@pytest.mark.parametrize("name", ["external link", "virtual", "external storage"])
def test_nor_is_it_read_or_written(tmp_path, name):
    FILES[name][1](tmp_path / "a.h5")
    with pytest.raises(ValueError, match="only data in the file itself"):
        SlideReader().read(str(tmp_path / "a.h5"), np.arange(3))
    with pytest.raises(ValueError, match="only data in the file itself"):
        write_attention(tmp_path / "a.h5", np.ones(30), C)


GOOD = {
    "contiguous": {},
    "a chunk a row": {"chunks": (1, 4)},
    "chunks that reach over": {"chunks": (7, 3)},
    "compressed": {"chunks": (30, 4), "compression": "gzip"},
    "growing": {"chunks": (16, 4), "maxshape": (None, 4)},
}


@pytest.mark.parametrize("name", GOOD)
def test_files_that_hold_what_they_say(tmp_path, name):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("deep/features", data=X, **GOOD[name])
        file["features"], file["coords"] = h5py.SoftLink("deep/features"), C
        file["hard"] = file["deep/features"]
    for called in ("features", "deep/features", "/deep/features", "hard"):
        slide = SlideReader(called).inspect(str(tmp_path / "a.h5"))
        assert (slide.tiles, slide.width) == X.shape
    features, _ = SlideReader().read(str(tmp_path / "a.h5"), np.arange(30))
    assert features.tolist() == X.tolist()


def test_zeros_compress_well(tmp_path):
    """A slide of blank tiles compresses far, but is valid."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("features", data=np.zeros((20_000, 64), np.float32), chunks=(5000, 64), compression="gzip")
        file.create_dataset("coords", data=np.stack([np.arange(20_000), np.zeros(20_000, int)], 1))
    assert SlideReader().inspect(str(tmp_path / "a.h5")).tiles == 20_000


def test_views_that_hold_all_their_values(tmp_path):
    values = {"features": torch.randn(4, 30).T, "coords": torch.from_numpy(C)[:, :2]}
    torch.save(values, tmp_path / "a.pt")
    assert SlideReader().inspect(str(tmp_path / "a.pt")).tiles == 30
