"""`lightning-dilated tokenize`: text files to one file of tokens, for TokenDataModule."""

from __future__ import annotations

import argparse
import shlex

from lightning_dilated.data import EncodedFiles, encode_files


def parser() -> argparse.ArgumentParser:
    """The options of `tokenize`."""
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


def report(found: EncodedFiles) -> str:
    """What was written, and the settings that go with it."""
    ends = "no ends of documents" if found.eos_token is None else f"{found.documents:,} documents"
    lines = [
        f"{found.path}: {found.tokens:,} tokens ({found.dtype}) of {found.files:,} files, {ends}",
        f"bytes per token: {found.bytes_per_token:.4f} ({found.text_bytes:,} bytes of text)",
    ]
    if found.unknown:
        share = found.unknown / found.tokens
        lines.append(f"unknown: {found.unknown:,} tokens ({share:.2%}) stand for what the vocabulary does not have")
    return "\n".join([*lines, f"train on it: {settings(found)}"])


def settings(found: EncodedFiles) -> str:
    """The arguments of `fit` that these tokens take."""
    values = {
        "data": "lightning_dilated.data.TokenDataModule",
        "data.paths": shlex.quote(found.path),
        "data.vocab_size": found.vocab_size,
        "data.dtype": found.dtype,
        "data.eos_token": found.eos_token,
        "model.vocab_size": found.vocab_size,
        "model.bytes_per_token": f"{found.bytes_per_token:.4f}",
    }
    return " ".join(f"--{name} {value}" for name, value in values.items() if value is not None)


def run(argv: list[str]) -> None:
    """Parse, encode, and print what was written."""
    args = parser().parse_args(argv)
    print(report(encode_files(args.tokenizer, args.inputs, args.out, args.eos_token, not args.no_documents)))
