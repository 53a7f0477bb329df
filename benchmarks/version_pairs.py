"""Two versions of a source tree as samples of bytes: [old files][the same files, new version].

    python benchmarks/version_pairs.py --old linux-source-6.1 --new linux-source-6.12 --out pairs.bin --suffixes .c .h \
        --changed_only --hold_out fs net

Shape letters: N bytes of a sample (`seq_len`).
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_dilated._validation import flag, integer, one_of
from lightning_dilated.ext.files.files import file_suffixes
from lightning_dilated.ext.text.tokenize import fit_arguments

#: range of the boundary, in parts of N
DRAWN = (7 / 16, 9 / 16)
_SPLITS = ("train", "val")


@dataclass(frozen=True)
class VersionPairs:
    """Results of `write_version_pairs`.

    `paths` and `samples` (numbers) of "train" and, with `hold_out`, of "val"; `json_path`; N in `seq_len`; `files`:
    number of files in both trees that match the options; `changed`: how many of them differ (None if all are taken).
    """

    paths: dict[str, str]
    samples: dict[str, int]
    json_path: str
    seq_len: int
    files: int
    changed: int | None


@dataclass(frozen=True)
class _Options:
    """Checked options of `write_version_pairs`. The JSON file contains them."""

    seq_len: int
    boundary: str
    suffixes: list[str] | None
    include: list[str]
    exclude: list[str]
    hold_out: list[str]
    changed_only: bool
    limit: int | None
    val_limit: int | None
    seed: int

    @classmethod
    def checked(cls, **options: object) -> _Options:
        """Return the options. Raises: TypeError or ValueError with the option's name."""
        suffixes = options["suffixes"]
        limits = {
            name: None if options[name] is None else integer(options[name], name, 1) for name in ("limit", "val_limit")
        }
        return cls(
            seq_len=integer(options["seq_len"], "seq_len", 16),
            boundary=one_of(options["boundary"], "boundary", ("fixed", "drawn")),
            suffixes=file_suffixes(suffixes, "suffixes"),
            include=_folders(options["include"], "include"),
            exclude=_folders(options["exclude"], "exclude"),
            hold_out=_folders(options["hold_out"], "hold_out"),
            changed_only=flag(options["changed_only"], "changed_only"),
            limit=limits["limit"],
            val_limit=limits["val_limit"],
            seed=integer(options["seed"], "seed", 0),
        )


@dataclass(frozen=True)
class _File:
    """A file in both trees: its name below the trees, and its size in bytes in each of them."""

    name: str
    old: int
    new: int


@dataclass(frozen=True)
class _Sample:
    """The files that fill a sample, and the sample's number of bytes from the old tree."""

    files: list[_File]
    boundary: int


def write_version_pairs(
    old: str | Path,
    new: str | Path,
    out: str | Path,
    *,
    seq_len: int = 65536,
    boundary: Literal["fixed", "drawn"] = "drawn",
    suffixes: Sequence[str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    hold_out: Sequence[str] = (),
    changed_only: bool = False,
    limit: int | None = None,
    val_limit: int | None = None,
    seed: int = 0,
) -> VersionPairs:
    """Write samples of `seq_len` bytes, each the beginning of some files of `old` and then of the same files of `new`.

    Files of both trees are taken in the order of their names until both parts of a sample are full. Their remaining
    bytes are cut off, so a file serves one sample. Files of a part follow each other without separator. Only plain
    files are read; links, and names that begin with a dot, are left out. One sample is held in memory.

    `out` gets the samples end to end in a random order that `seed` fixes, and one byte more, the last label:
    TokenDataModule with `dtype: uint8` and ByteDataModule read all samples with the same `seq_len`. Samples of
    `hold_out` go to OUT.val.bin. OUT.json names the trees, the options, the counts, and the boundary of each sample if
    it is drawn. Files appear under these names only once all is written.

    Args:
        old, new: folders.
        out: the file to write, in .bin.
        seq_len: N, at least 16.
        boundary: "fixed" gives the old files N/2 bytes of each sample, "drawn" between 7/16 and 9/16 of N.
        suffixes: endings of the files to take, such as .c and .h; None takes all.
        include: folders or files below the trees to take, such as drivers and sound; none takes all.
        exclude: folders or files to leave out.
        hold_out: folders or files with samples for validation.
        changed_only: leave out files that are equal in both trees.
        limit, val_limit: maximum number of samples for training and for validation, chosen at random; None: all.
        seed: fixes the order, the choice and the boundaries.

    Raises:
        TypeError, ValueError, OSError: before anything is written, with the option, the problem and the remedy.
        ValueError: for a file that becomes shorter while it is read; no file is left behind then.
    """
    options = _Options.checked(
        seq_len=seq_len, boundary=boundary, suffixes=suffixes, include=include, exclude=exclude, hold_out=hold_out,
        changed_only=changed_only, limit=limit, val_limit=val_limit, seed=seed,
    )  # fmt: skip
    roots = _root(old, "old"), _root(new, "new")
    if os.path.samefile(*roots):
        raise ValueError(f"old and new are both {roots[0]}: name the two versions of the tree")
    targets = _targets(Path(out), options)
    common = _taken(roots, options)
    used = [file for file in common if not (options.changed_only and _equal(roots, file))]
    if not used:
        raise ValueError(
            f"all {len(common):,} files are equal in both trees: leave changed_only out, or name other trees"
        )
    plan = {split: _planned(used, split, options) for split in _SPLITS if split in targets}
    result = VersionPairs(
        paths={split: str(targets[split]) for split in plan},
        samples={split: len(samples) for split, samples in plan.items()},
        json_path=str(targets["json"]),
        seq_len=options.seq_len,
        files=len(common),
        changed=len(used) if options.changed_only else None,
    )
    _write(roots, targets, plan, options.seq_len, _about(roots, plan, result, options))
    return result


# -- which files -------------------------------------------------------------------------------------------------------
def _taken(roots: tuple[str, str], options: _Options) -> list[_File]:
    """Return the files of both trees that match the options, one folder after the other."""
    old, new = (dict(_plain_files(root)) for root in roots)
    common = sorted(old.keys() & new.keys(), key=lambda name: name.split("/"))
    if not common:
        raise ValueError(
            f"no file lies in both trees ({len(old):,} files below {roots[0]}, {len(new):,} below {roots[1]}): name the "
            "same folder of each version"
        )
    for option in ("include", "exclude", "hold_out"):
        for folder in getattr(options, option):
            if not any(_below(name, [folder]) for name in common):
                top = sorted({name.split("/")[0] for name in common})
                shown = ", ".join(top[:12]) + (", ..." if len(top) > 12 else "")
                raise ValueError(f"{option} names {folder!r}, but no file of both trees lies there. They have: {shown}")
    chosen = [
        _File(name, old[name], new[name])
        for name in common
        if (not options.suffixes or name.endswith(tuple(options.suffixes)))
        and (not options.include or _below(name, [*options.include, *options.hold_out]))
        and not _below(name, options.exclude)
    ]
    if not chosen:
        raise ValueError(
            f"none of the {len(common):,} files of both trees is left by suffixes {options.suffixes}, include "
            f"{options.include} and exclude {options.exclude}: take more"
        )
    return chosen


def _plain_files(root: str) -> Iterator[tuple[str, int]]:
    """Yield (name below the root with "/", bytes) of regular files, without links and hidden names."""
    folders = [""]
    while folders:
        prefix = folders.pop()
        with os.scandir(os.path.join(root, prefix)) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size


def _below(name: str, folders: Sequence[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _equal(roots: tuple[str, str], file: _File) -> bool:
    one, two = (os.path.join(root, file.name) for root in roots)
    return file.old == file.new and filecmp.cmp(one, two, shallow=False)


# -- which samples -----------------------------------------------------------------------------------------------------
def _planned(files: list[_File], split: str, options: _Options) -> list[_Sample]:
    """Return the samples of a split in the order in which they are written. Raises: ValueError if there are none."""
    chosen = [file for file in files if _below(file.name, options.hold_out) == (split == "val")]
    rng = np.random.default_rng([options.seed, _SPLITS.index(split)])
    samples = list(_filled(chosen, rng, options))
    if not samples:
        total = f"{sum(x.old for x in chosen):,} bytes in the old and {sum(x.new for x in chosen):,} in the new tree"
        change = "hold out less" if split == "train" else "hold out more"
        raise ValueError(
            f"the {split} split has {len(chosen):,} files of {total}, which do not fill a sample of seq_len = "
            f"{options.seq_len}, about half of it from each: lower seq_len, take more files, or "
            f"{change if options.hold_out else 'name other trees'}"
        )
    order = rng.permutation(len(samples))
    return [samples[i] for i in order[: options.limit if split == "train" else options.val_limit]]


def _filled(files: list[_File], rng: np.random.Generator, options: _Options) -> Iterator[_Sample]:
    """Yield samples of consecutive files that fill both parts. The last files may not fill a sample."""
    low, high = (int(options.seq_len * part) for part in DRAWN)
    fixed = options.boundary == "fixed"
    group: list[_File] = []
    old = new = 0
    boundary = options.seq_len // 2 if fixed else int(rng.integers(low, high + 1))
    for file in files:
        group.append(file)
        old, new = old + file.old, new + file.new
        if old >= boundary and new >= options.seq_len - boundary:
            yield _Sample(group, boundary)
            group, old, new = [], 0, 0
            boundary = options.seq_len // 2 if fixed else int(rng.integers(low, high + 1))


# -- writing -----------------------------------------------------------------------------------------------------------
def _write(
    roots: tuple[str, str],
    targets: dict[str, Path],
    plan: dict[str, list[_Sample]],
    seq_len: int,
    about: dict[str, object],
) -> None:
    """Write samples and JSON under temporary names, then rename all files."""
    parts = {kind: path.with_name(f"{path.name}.part") for kind, path in targets.items()}
    try:
        for split, samples in plan.items():
            with open(parts[split], "wb") as out:
                for sample in samples:
                    out.write(_part(roots[0], sample.files, sample.boundary))
                    out.write(_part(roots[1], sample.files, seq_len - sample.boundary))
                out.write(b"\n")  # the label of the last byte
        parts["json"].write_text(json.dumps(about, indent=1) + "\n")
        for kind, path in targets.items():
            os.replace(parts[kind], path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _part(root: str, files: list[_File], count: int) -> bytes:
    """Read the first `count` bytes of the files, and no more. Raises: ValueError if the files became shorter."""
    data = bytearray()
    for file in files:
        if len(data) < count:
            with open(os.path.join(root, file.name), "rb") as source:
                data += source.read(count - len(data))
    if len(data) < count:
        names = f"{files[0].name} to {files[-1].name}" if len(files) > 1 else files[0].name
        raise ValueError(
            f"{root}: {names} became shorter while they were read: leave the trees unchanged, and start again"
        )
    return bytes(data)


def _about(
    roots: tuple[str, str], plan: dict[str, list[_Sample]], result: VersionPairs, options: _Options
) -> dict[str, object]:
    half = options.seq_len // 2
    splits = {
        split: {
            "file": Path(result.paths[split]).name,
            "samples": len(samples),
            "files": sum(len(sample.files) for sample in samples),
            "boundaries": half if options.boundary == "fixed" else [sample.boundary for sample in samples],
        }
        for split, samples in plan.items()
    }
    counts = {"files": result.files, "changed": result.changed}
    return {"old": roots[0], "new": roots[1], "options": asdict(options), **counts, "splits": splits}


# -- options -----------------------------------------------------------------------------------------------------------
def _folders(value: object, option: str) -> list[str]:
    """Return names below the trees without a trailing slash. Raises: TypeError or ValueError with the option's name."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(x, str) for x in value):
        raise TypeError(f"{option} must be a list of folders below the trees, such as ['fs', 'net']; got {value!r}.")
    names = [os.path.normpath(x).replace(os.sep, "/") for x in value]
    for folder, name in zip(value, names, strict=True):
        if not folder or os.path.isabs(folder) or name.split("/")[0] in (".", ".."):
            raise ValueError(
                f"{option} must name folders or files below both trees, such as drivers/net; got {folder!r}."
            )
    return names


def _root(folder: str | Path, option: str) -> str:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{option} {folder}: there is no such folder")
    return os.path.abspath(folder)


def _targets(out: Path, options: _Options) -> dict[str, Path]:
    """Return the files to write: "train", "json", and "val" if files are held out."""
    if out.suffix != ".bin":
        raise ValueError(f"out is {out}; samples are written as raw bytes, so let its name end in .bin")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"out {out}: there is no folder {out.parent}; make it first")
    targets = {"train": out, "val": out.with_suffix(".val.bin"), "json": out.with_suffix(".json")}
    if not options.hold_out:
        del targets["val"]
    for path in targets.values():
        if path.exists():
            raise FileExistsError(f"{path} exists already: remove it, or choose another name for out")
    return targets


def main() -> None:
    """Run the command: write two versions of a source tree as samples of bytes, and print a report."""
    args = vars(parser().parse_args())
    print(report(write_version_pairs(args.pop("old"), args.pop("new"), args.pop("out"), **args)))


def parser() -> argparse.ArgumentParser:
    about = (
        "Write samples of bytes, each [files of the old tree][the same files of the new tree], of files that lie in both. "
        "Only plain files are read; links and names that begin with a dot are left out."
    )
    p = argparse.ArgumentParser(description=about)
    p.add_argument("--old", required=True, help="folder of the old version")
    p.add_argument("--new", required=True, help="folder of the new version")
    p.add_argument("--out", required=True, help="the file to write, in .bin, with OUT.val.bin and OUT.json next to it")
    p.add_argument("--seq_len", type=int, default=65536, help="bytes of a sample (default: 65536)")
    p.add_argument(
        "--boundary",
        choices=("fixed", "drawn"),
        default="drawn",
        help="where the new files begin: at half of each sample, or drawn from 7/16 to 9/16 of it (default: drawn)",
    )
    p.add_argument(
        "--suffixes", nargs="+", metavar="X", help="endings of the files to take, such as .c .h (default: all)"
    )
    p.add_argument("--include", nargs="+", default=[], metavar="FOLDER", help="take files below these folders only")
    p.add_argument("--exclude", nargs="+", default=[], metavar="FOLDER", help="leave files below these folders out")
    p.add_argument("--hold_out", nargs="+", default=[], metavar="FOLDER", help="folders for validation, in OUT.val.bin")
    p.add_argument("--changed_only", action="store_true", help="leave out files that are equal in both trees")
    p.add_argument("--limit", type=int, help="most samples for training, chosen at random (default: all)")
    p.add_argument("--val_limit", type=int, help="most samples for validation, chosen at random (default: all)")
    p.add_argument("--seed", type=int, default=0, help="fixes order, choice and boundaries (default: 0)")
    return p


def report(written: VersionPairs) -> str:
    """Return a summary of the files, and the settings to read them with."""
    changed = "" if written.changed is None else f", of which {written.changed:,} differ"
    lines = [f"{written.files:,} files in both trees{changed}"]
    for split, path in written.paths.items():
        lines.append(f"{path}: {written.samples[split]:,} samples of {written.seq_len:,} bytes ({split})")
    lines.append(f"boundaries, options and counts: {written.json_path}")
    val = written.paths.get("val")
    arguments = fit_arguments(
        written.paths["train"],
        data__val_paths=None if val is None else shlex.quote(val),
        data__val_fraction=None if val is None else 0,
        data__test_fraction=None if val is None else 0,
        data__dtype="uint8",
        data__vocab_size=256,
        data__seq_len=written.seq_len,
    )
    return "\n".join([*lines, f"train on it: {arguments}"])


if __name__ == "__main__":
    main()
