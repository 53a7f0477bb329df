"""`lightning-dilated pairs`: a file for TokenDataModule from two versions of a source tree."""

from __future__ import annotations

import argparse
import shlex

from lightning_dilated.ext.text.tokenize import fit_arguments
from lightning_dilated.ext.text.version_pairs import VersionPairs, write_version_pairs


def pairs(argv: list[str]) -> None:
    """Write two versions of a source tree as samples of bytes, and print what was written."""
    args = vars(pairs_parser().parse_args(argv))
    print(pairs_report(write_version_pairs(args.pop("old"), args.pop("new"), args.pop("out"), **args)))


def pairs_parser() -> argparse.ArgumentParser:
    about = (
        "Write samples of bytes, each [files of the old tree][the same files of the new tree], of files that lie in both. "
        "Only plain files are read; links and names that begin with a dot are left out."
    )
    p = argparse.ArgumentParser("lightning-dilated pairs", description=about)
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


def pairs_report(written: VersionPairs) -> str:
    """What was written, and the settings that go with it."""
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
