"""`lightning-dilated tokenize`: encode text files into a file for TokenDataModule."""

from __future__ import annotations

import argparse
import shlex

from lightning_dilated.data import EncodedFiles, encode_files


def tokenize(argv: list[str]) -> None:
    """Encode text files into one file of tokens, and print a report."""
    args = tokenize_parser().parse_args(argv)
    print(tokenize_report(encode_files(args.tokenizer, args.inputs, args.out, args.eos_token, not args.no_documents)))


def fit_arguments(paths: str, **values: object) -> str:
    """Return `fit` arguments for a file of tokens; in keys of `values`, __ means a dot; None omits an argument."""
    options = {"data": "lightning_dilated.data.TokenDataModule", "data__paths": shlex.quote(paths), **values}
    return " ".join(f"--{name.replace('__', '.')} {x}" for name, x in options.items() if x is not None)


def tokenize_parser() -> argparse.ArgumentParser:
    about = "Encode UTF-8 text files, each one document, into a .bin of tokens. Needs the extra tokenizers."
    p = argparse.ArgumentParser("lightning-dilated tokenize", description=about)
    p.add_argument("--tokenizer", required=True, help="a tokenizer.json of Hugging Face's tokenizers")
    p.add_argument("--out", required=True, help="the file to write, in .bin")
    p.add_argument("--eos_token", help="token after each document (default: the tokenizer's special token, if any)")
    p.add_argument("--no_documents", action="store_true", help="write no ends of documents: one text after another")
    p.add_argument("inputs", nargs="+", metavar="FILE", help="files, directories or globs")
    return p


def tokenize_report(written: EncodedFiles) -> str:
    """Return a report of the written file, with the settings to train on it."""
    ends = "no ends of documents" if written.eos_token is None else f"{written.documents:,} documents"
    lines = [
        f"{written.path}: {written.tokens:,} tokens ({written.dtype}) of {written.files:,} files, {ends}",
        f"bytes per token: {written.bytes_per_token:.4f} ({written.text_bytes:,} bytes of text)",
    ]
    if written.unknown:
        share = written.unknown / written.tokens
        lines.append(f"unknown: {written.unknown:,} tokens ({share:.2%}) stand for text that the vocabulary lacks")
    arguments = fit_arguments(
        written.path,
        data__vocab_size=written.vocab_size,
        data__dtype=written.dtype,
        data__eos_token=written.eos_token,
        model__vocab_size=written.vocab_size,
        model__bytes_per_token=f"{written.bytes_per_token:.4f}",
    )
    return "\n".join([*lines, f"train on it: {arguments}"])
