"""Two versions of a tree as samples: which files, in which parts, how they are read again, and what is refused."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lightning_dilated.data import ByteDataModule, TokenDataModule, write_version_pairs
from lightning_dilated.ext.text import version_pairs

N = 256


def tree(root: Path, version: int, files: int = 60) -> str:
    """Files of 40 to 179 bytes in four folders; every third one is the same in all versions."""
    draw = np.random.default_rng(0)
    for number in range(files):
        size, folder = int(draw.integers(40, 180)), ("fs", "net", "drivers/usb", "drivers/net")[number % 4]
        line = f"{folder} {number} version {0 if number % 3 == 0 else version} "
        path = root / folder / f"f{number:03}.{'c' if number % 2 else 'h'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((line * 20)[:size])
    return str(root)


@pytest.fixture
def trees(tmp_path: Path) -> tuple[str, str]:
    return tree(tmp_path / "old", 1), tree(tmp_path / "new", 2)


def cut(path: str, seq_len: int = N) -> list[bytes]:
    """The samples of a file, and the last label."""
    data = Path(path).read_bytes()
    assert len(data) % seq_len == 1 and data[-1:] == b"\n"
    return [data[i : i + seq_len] for i in range(0, len(data) - 1, seq_len)]


def groups(old: str, new: str, names: list[str], boundaries: list[int]) -> list[bytes]:
    """What the samples have to be, by the rule: neighbouring files as long as a part is not full."""
    out, first, second = [], b"", b""
    for name in names:
        boundary = boundaries[len(out)] if len(out) < len(boundaries) else None
        first, second = first + (Path(old) / name).read_bytes(), second + (Path(new) / name).read_bytes()
        if boundary is not None and len(first) >= boundary and len(second) >= N - boundary:
            out.append(first[:boundary] + second[: N - boundary])
            first = second = b""
    return out


def names(root: str) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in Path(root).rglob("*") if p.is_file())


def test_samples_are_old_files_and_then_the_same_files_new(trees: tuple[str, str], tmp_path: Path) -> None:
    found = write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N, boundary="fixed")
    samples = cut(found.paths["train"])
    want = groups(*trees, names(trees[0]), [N // 2] * 1000)
    assert len(samples) == found.samples["train"] == len(want) > 15
    assert sorted(samples) == sorted(want) and samples != want  # in another order
    assert (found.files, found.changed, set(found.paths)) == (60, None, {"train"})
    about = json.loads(Path(found.json_path).read_text())
    assert (about["old"], about["new"], about["files"]) == (*trees, 60)
    assert about["splits"]["train"]["boundaries"] == N // 2 and about["splits"]["train"]["file"] == "a.bin"
    assert about["options"]["seq_len"] == N and about["options"]["seed"] == 0


def test_drawn_boundaries_are_in_the_json(trees: tuple[str, str], tmp_path: Path) -> None:
    """Where the new files begin: between 7/16 and 9/16, another place in most samples."""
    found = write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N)
    boundaries = json.loads(Path(found.json_path).read_text())["splits"]["train"]["boundaries"]
    samples = cut(found.paths["train"])
    assert len(boundaries) == len(samples) and len(set(boundaries)) > 8
    assert 7 / 16 * N <= min(boundaries) < 0.46 * N and 0.54 * N < max(boundaries) <= 9 / 16 * N
    texts = [{root: [(Path(root) / x).read_bytes() for x in names(root)] for root in trees}][0]
    for sample, boundary in zip(samples, boundaries, strict=True):
        for root, part in zip(trees, (sample[:boundary], sample[boundary:]), strict=True):
            first = [i for i, text in enumerate(texts[root]) if part.startswith(text[: len(part)])]
            assert any(b"".join(texts[root][i:])[: len(part)] == part for i in first)


def test_held_out_folders_and_others_left_out(trees: tuple[str, str], tmp_path: Path) -> None:
    options = {
        "include": ["drivers"],
        "exclude": ["drivers/net/"],
        "hold_out": ["fs", "./net"],
        "suffixes": ["c", ".h"],
    }
    found = write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N, boundary="fixed", **options)
    assert found.paths == {"train": str(tmp_path / "a.bin"), "val": str(tmp_path / "a.val.bin")}
    train, val = (b"".join(cut(path)) for path in found.paths.values())
    assert b"drivers/usb" in train and not any(x in train for x in (b"fs ", b"net "))
    assert b"fs " in val and b"net " in val and b"drivers" not in val
    assert found.samples == {"train": len(train) // N, "val": len(val) // N} and found.files == 45
    one = write_version_pairs(
        *trees, tmp_path / "b.bin", seq_len=N, suffixes=[".c"], hold_out=["net/f001.c", "net/f005.c"]
    )
    assert one.files == 30 and one.samples["val"] == 1 and b"net 1 v" in cut(one.paths["val"])[0]


def test_changed_files_only(trees: tuple[str, str], tmp_path: Path) -> None:
    """Every third file is the same in both, some of equal size as changed ones."""
    found = write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N, changed_only=True)
    assert (found.files, found.changed) == (60, 40)
    text = b"".join(cut(found.paths["train"]))
    assert b"version 1" in text and b"version 2" in text and b"version 0" not in text


def test_files_of_one_tree_links_and_hidden_ones_are_not_read(trees: tuple[str, str], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "s.c").write_text("SECRET " * 100)
    before = write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N)
    (Path(trees[0]) / "only_old.c").write_text("SECRET" * 100)
    for root in map(Path, trees):
        (root / "aside").symlink_to(secret)
        (root / "link.c").symlink_to(secret / "s.c")
        (root / "loop").symlink_to(root)
        (root / ".git").mkdir()
        (root / ".git" / "x.c").write_text("SECRET" * 100)
        (root / ".hidden.c").write_text("SECRET" * 100)
        os.mkfifo(root / "fifo.c")
    after = write_version_pairs(*trees, tmp_path / "b.bin", seq_len=N)
    assert Path(after.paths["train"]).read_bytes() == Path(before.paths["train"]).read_bytes()
    # a plain file in one tree that is a link in the other is no file of both
    (Path(trees[1]) / "only_old.c").symlink_to(secret / "s.c")
    assert write_version_pairs(*trees, tmp_path / "c.bin", seq_len=N).files == 60


def test_the_seed_alone_decides(trees: tuple[str, str], tmp_path: Path) -> None:
    written = {}
    for name, options in {"a": {}, "again": {}, "other": {"seed": 1}, "few": {"limit": 4, "val_limit": 2}}.items():
        found = write_version_pairs(*trees, tmp_path / f"{name}.bin", seq_len=N, hold_out=["net"], **options)
        written[name] = [cut(found.paths["train"]), cut(found.paths["val"])]
    assert written["a"] == written["again"] and written["a"] != written["other"]
    assert [len(x) for x in written["few"]] == [4, 2]
    assert all(set(few) <= set(whole) for few, whole in zip(written["few"], written["a"], strict=True))


@pytest.mark.parametrize("boundary", ["fixed", "drawn"])
def test_every_sample_is_read_again(trees: tuple[str, str], tmp_path: Path, boundary: str) -> None:
    """By TokenDataModule with a file for each split, and by ByteDataModule; labels are the next byte."""
    found = write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N, boundary=boundary, hold_out=["fs"])
    tokens = TokenDataModule(found.paths["train"], N, 256, val_paths=found.paths["val"], dtype="uint8")
    plain = ByteDataModule(found.paths["train"], N, val_fraction=0, test_fraction=0)
    for split, data in (("train", tokens), ("val", tokens), ("train", plain)):
        whole = Path(found.paths[split]).read_bytes()
        served = data.dataset(split)
        assert len(served) == found.samples[split] > 3
        for index, sample in enumerate(cut(found.paths[split])):
            assert bytes(served[index]["tokens"].tolist()) == sample
            assert bytes(served[index]["labels"].tolist()) == whole[index * N + 1 : index * N + N + 1]


def test_memory_does_not_grow_with_the_trees(tmp_path: Path) -> None:
    """Two trees of 40 MB: less than a sixteenth of that is held."""
    for version in ("old", "new"):
        for number in range(10):
            path = tmp_path / version / f"{number}.c"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes([number + 65]) * (4 << 20))
    tracemalloc.start()
    found = write_version_pairs(tmp_path / "old", tmp_path / "new", tmp_path / "a.bin", seq_len=1 << 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.samples["train"] == 10 and peak < 40 * 2**20 / 16


# -- what is refused ---------------------------------------------------------------------------------------------------
BAD = [
    ({"old": "gone"}, FileNotFoundError, "old .*gone: there is no such folder"),
    ({"new": "old"}, ValueError, "old and new are both .*old: name the two versions"),
    ({"new": "empty"}, ValueError, r"no file lies in both trees \(60 files below .*, 0 below"),
    ({"out": "a.txt"}, ValueError, "out is .*a.txt; samples are written as raw bytes, so let its name end in .bin"),
    ({"out": "none/a.bin"}, FileNotFoundError, "there is no folder .*none; make it first"),
    ({"out": "there.bin"}, FileExistsError, "there.bin exists already: remove it"),
    ({"out": "half.bin", "hold_out": ["fs"]}, FileExistsError, "half.val.bin exists already"),
    ({"out": "told.bin"}, FileExistsError, "told.json exists already"),
    ({"seq_len": 15}, ValueError, "seq_len must be at least 16, got 15"),
    ({"boundary": "random"}, ValueError, "boundary must be one of fixed, drawn; got 'random'"),
    ({"suffixes": []}, ValueError, r"suffixes must hold at least one ending"),
    ({"suffixes": [".py"]}, ValueError, r"none of the 60 files of both trees is left by suffixes \['.py'\]"),
    ({"include": "fs"}, TypeError, "include must be a list of folders .*got 'fs'"),
    (
        {"include": ["mm"]},
        ValueError,
        "include names 'mm', but no file of both trees lies there. They have: drivers, fs, net",
    ),
    ({"hold_out": ["sound"]}, ValueError, "hold_out names 'sound', but no file"),
    ({"exclude": ["../old/fs"]}, ValueError, "exclude must name folders or files below both trees.*got '../old/fs'"),
    ({"exclude": ["/etc"]}, ValueError, "exclude must name .*got '/etc'"),
    ({"hold_out": ["fs", "net", "drivers"]}, ValueError, "the train split has 0 files of 0 bytes .* or hold out less"),
    ({"hold_out": ["fs/f000.h"], "seq_len": 512}, ValueError, "the val split has 1 files of .* or hold out more"),
    ({"seq_len": 1 << 20}, ValueError, "the train split has 60 files of .* lower seq_len, .* or name other trees"),
    ({"limit": 0}, ValueError, "limit must be .*got .*0"),
    ({"changed_only": "yes"}, TypeError, "changed_only must be .*got .*'yes'"),
    ({"new": "copy", "changed_only": True}, ValueError, "all 60 files are equal in both trees: leave changed_only out"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_refused_before_anything_is_written(
    trees: tuple[str, str], tmp_path: Path, options: dict, error: type[Exception], message: str
) -> None:
    tree(tmp_path / "copy", 1)
    (tmp_path / "empty").mkdir()
    for name in ("there.bin", "half.val.bin", "told.json"):
        (tmp_path / name).write_bytes(b"x")
    before = sorted(tmp_path.iterdir())
    given = {"old": "old", "new": "new", "out": "a.bin", "seq_len": N, **options}
    paths = [tmp_path / given.pop(name) for name in ("old", "new", "out")]
    with pytest.raises(error, match=message):
        write_version_pairs(*paths, **given)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_becomes_shorter_leaves_nothing(trees: tuple[str, str], tmp_path: Path, monkeypatch) -> None:
    real = version_pairs._planned

    def shortened(*args):
        for path in Path(trees[1]).rglob("*.c"):
            path.write_text("")
        return real(*args)

    monkeypatch.setattr(version_pairs, "_planned", shortened)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="became shorter while they were read"):
        write_version_pairs(*trees, tmp_path / "a.bin", seq_len=N)
    assert sorted(tmp_path.iterdir()) == before
