"""`lightning-dilated tokenize` and `pairs`: files for TokenDataModule from texts, and from two versions of a source tree."""

from __future__ import annotations

import argparse
import shlex

from lightning_dilated.data import EncodedFiles, VersionPairs, encode_files, write_version_pairs


def tokenize(argv: list[str]) -> None:
    """Encode text files into one file of tokens, and print what was written."""
    args = tokenize_parser().parse_args(argv)
    print(tokenize_report(encode_files(args.tokenizer, args.inputs, args.out, args.eos_token, not args.no_documents)))


def pairs(argv: list[str]) -> None:
    """Write two versions of a source tree as samples of bytes, and print what was written."""
    args = vars(pairs_parser().parse_args(argv))
    print(pairs_report(write_version_pairs(args.pop("old"), args.pop("new"), args.pop("out"), **args)))


def fit_arguments(paths: str, **values: object) -> str:
    """The arguments of `fit` for a file of tokens; in the keys of `values` __ stands for a dot, and None leaves one out."""
    options = {"data": "lightning_dilated.data.TokenDataModule", "data__paths": shlex.quote(paths), **values}
    return " ".join(f"--{name.replace('__', '.')} {x}" for name, x in options.items() if x is not None)


def tokenize_parser() -> argparse.ArgumentParser:
    about = "Encode UTF-8 text files, each one document, into a .bin of tokens. Takes the extra tokenizers."
    p = argparse.ArgumentParser("lightning-dilated tokenize", description=about)
    p.add_argument("--tokenizer", required=True, help="a tokenizer.json of Hugging Face's tokenizers")
    p.add_argument("--out", required=True, help="the file to write, in .bin")
    p.add_argument(
        "--eos_token", help="token after each document (default: the tokenizer's special token, if it has one)"
    )
    p.add_argument("--no_documents", action="store_true", help="write no ends of documents: one text after another")
    p.add_argument("inputs", nargs="+", metavar="FILE", help="files, directories or globs")
    return p


def tokenize_report(written: EncodedFiles) -> str:
    """What was written, and the settings that go with it."""
    ends = "no ends of documents" if written.eos_token is None else f"{written.documents:,} documents"
    lines = [
        f"{written.path}: {written.tokens:,} tokens ({written.dtype}) of {written.files:,} files, {ends}",
        f"bytes per token: {written.bytes_per_token:.4f} ({written.text_bytes:,} bytes of text)",
    ]
    if written.unknown:
        share = written.unknown / written.tokens
        lines.append(f"unknown: {written.unknown:,} tokens ({share:.2%}) stand for what the vocabulary does not have")
    arguments = fit_arguments(
        written.path,
        data__vocab_size=written.vocab_size,
        data__dtype=written.dtype,
        data__eos_token=written.eos_token,
        model__vocab_size=written.vocab_size,
        model__bytes_per_token=f"{written.bytes_per_token:.4f}",
    )
    return "\n".join([*lines, f"train on it: {arguments}"])


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
