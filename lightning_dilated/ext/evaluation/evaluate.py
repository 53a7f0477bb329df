"""`lightning-dilated evaluate`: measure how much of its context a language model uses, by questions about it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl

from lightning_dilated._validation import integer
from lightning_dilated.cli.errors import check_device
from lightning_dilated.cli.load_model import load_any
from lightning_dilated.cli.main import quiet
from lightning_dilated.data import LongContextDataModule
from lightning_dilated.data.tokenizer_files import MAIN, write_files
from lightning_dilated.ext.evaluation.accuracy_by_depth import NAME, AccuracyByDepth, check_fits
from lightning_dilated.ext.transformers import HFCausalLM
from lightning_dilated.models import DilatedModule, LongNetLM

TASKS = ("needle", "multi_key", "multi_value", "tracing")
ABOUT = """
Test how much of its context a language model uses: filler states a value, the end asks for it, and an answer is right
if each of its tokens is the likeliest one. Prints the share of right answers by length and depth, and writes
accuracy_by_depth.csv and a picture of each task into --out. Nothing is downloaded: texts are made by rule from --seed.
"""
#: number of tokens per tile of a transformers decoder's logits
_TILE = 1024


#: {option of the samples: (default, meaning)}
_SAMPLES = {
    "num_values": (3, "for multi_value: number of values of a key"),
    "hops": (3, "for tracing: statements between the value and the variable that is asked for"),
    "value_digits": (5, "for text: number of digits of a value"),
    "vocabulary": (32, "for tokens: number of symbols for keys, and for values"),
    "fillers": (16, "for tokens: kinds of filler"),
    "key_tokens": (1, "for tokens: symbols of a key"),
    "value_tokens": (1, "for tokens: symbols of a value"),
    "batch_size": (1, "samples computed at a time"),
    "seed": (0, "seed of the samples"),
}


def load_causal_model(path: str | Path, tile: int | None = None) -> DilatedModule:
    """Load a model as `load_any` does; raise ValueError if the model does not predict the next token."""
    model = load_any(path, tile)
    if not model.predicts_next_token:
        raise ValueError(
            f"--ckpt_path {path} holds a {type(model).__name__}, which does not predict the next token; evaluate takes a "
            "LongNetLM or a HFCausalLM."
        )
    return model


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("lightning-dilated evaluate", description=ABOUT)
    p.add_argument(
        "--ckpt_path",
        required=True,
        help="checkpoint of a LongNetLM or HFCausalLM, or a folder of save_pretrained, also of transformers",
    )
    p.add_argument("--out", required=True, help="folder for the CSV and the pictures")
    _add_questions(p)
    _add_samples(p)
    _add_machine(p)
    return p


def _add_questions(p: argparse.ArgumentParser) -> None:
    p.add_argument("--task", nargs="+", choices=TASKS, default=["needle"], help="one or several (default: needle)")
    p.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], help="tokens (default: %(default)s)")
    p.add_argument(
        "--depths",
        nargs="+",
        type=float,
        default=[0, 25, 50, 75, 100],
        help="depths of the stated value, in percent from the beginning (default: %(default)s)",
    )
    p.add_argument("--samples", type=int, default=20, help="samples of each length and depth (default: %(default)s)")


def _add_samples(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--tokenizer", help="tokenizer.json, or a folder with one (default: the checkpoint's or folder's, else bytes)"
    )
    p.add_argument(
        "--form",
        choices=("text", "tokens"),
        default="text",
        help="text, or tokens for a model that was trained on LongContextDataModule(form='tokens')",
    )
    p.add_argument("--distractors", type=int, help="number of keys not asked for (default: 3; 15 for multi_key)")
    for name, (default, meaning) in _SAMPLES.items():
        p.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)")


def _add_machine(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--devices", type=int, default=1, help="GPUs or processes, which share each sample (default: %(default)s)"
    )
    p.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    p.add_argument(
        "--precision", help="the Trainer's precision, such as bf16-true (default: 32-true, on cuda bf16-true)"
    )


def run(argv: list[str]) -> None:
    """Check the options, the model and the data of all tasks, then evaluate task by task."""
    args = parser().parse_args(argv)
    check_device(args.device)
    integer(args.devices, "--devices", 1)
    out = checked_folder(args.out)
    quiet("evaluate")
    model = load_causal_model(args.ckpt_path, _TILE)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(args, model, Path(folder))
        tasks = [data_of(args, task, tokenizer) for task in dict.fromkeys(args.task)]
    for data in tasks:
        check_fits(model, data)
    trainer = trainer_of(args, out)
    for data in tasks:
        trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        pictures = ", ".join(f"{NAME}_{data.task.name}.png" for data in tasks)
        print(f"written to {out}: {NAME}.csv, {pictures}")


def checked_folder(path: str) -> Path:
    """Return the folder of `--out`. Raises FileExistsError if it is a file, or contains an earlier result."""
    out = Path(path)
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out {out} is a file; give a folder.")
    if (out / f"{NAME}.csv").exists():
        raise FileExistsError(
            f"--out {out} holds {NAME}.csv of an earlier evaluation: give another folder, or remove it."
        )
    return out


def tokenizer_of(args: argparse.Namespace, model: LongNetLM | HFCausalLM, folder: Path) -> str | None:
    """Return the path of the tokenizer for text, or None for bytes. A checkpoint's tokenizer is written into `folder`.

    Raises: ValueError if the model needs a tokenizer that is not known.
    """
    if args.form == "tokens" or args.tokenizer is not None:
        return args.tokenizer
    if (Path(args.ckpt_path) / "tokenizer.json").is_file():
        return args.ckpt_path
    if model.tokenizer_files is not None:
        write_files(folder, model.tokenizer_files)
        return str(folder / MAIN)
    if (size := model.vocab_size) == 256:
        return None
    raise ValueError(
        f"--ckpt_path {args.ckpt_path} has a vocabulary of {size}, so it does not read bytes: give --tokenizer with the "
        "tokenizer.json that it was trained with, or --form tokens for a model that was trained on "
        "LongContextDataModule(form='tokens')."
    )


def data_of(args: argparse.Namespace, task: str, tokenizer: str | None) -> LongContextDataModule:
    """Return the samples of a task. Raises TypeError, ValueError or FileNotFoundError that names the option."""
    options = {name: getattr(args, name) for name in (*_SAMPLES, "distractors")}
    try:
        data = LongContextDataModule(
            task, args.lengths, args.depths, args.samples, args.form, tokenizer, train_size=args.batch_size, **options
        )
        data.check()
    except (TypeError, ValueError, FileNotFoundError) as error:
        changed = str(error).replace("data.samples_per_cell", "--samples").replace("data.", "--")
        raise type(error)(changed) from None
    return data


def trainer_of(args: argparse.Namespace, out: Path) -> pl.Trainer:
    """Return a Trainer for `test`, with an `AccuracyByDepth` callback."""
    cuda = args.device.startswith("cuda")
    number = args.device.partition(":")[2]
    if number and args.devices > 1:
        raise ValueError(f"--device {args.device} is one GPU, and --devices is {args.devices}: leave one of them out.")
    return pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=[int(number)] if number else args.devices,
        strategy="auto" if args.devices == 1 else "ring_dilated",
        precision=args.precision or ("bf16-true" if cuda else "32-true"),
        callbacks=[AccuracyByDepth(out)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
        default_root_dir=str(out),
    )
