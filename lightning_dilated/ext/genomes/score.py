"""`lightning-dilated score`: score the alleles of a VCF file with a genome model, and write a CSV row for each."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_dilated._validation import integer
from lightning_dilated.cli.errors import check_device
from lightning_dilated.cli.load_model import load_module
from lightning_dilated.data import Genome, Variant, allele_windows, read_variants
from lightning_dilated.ext.evaluation.predictions import guarded_field
from lightning_dilated.ext.files.files import collect_files
from lightning_dilated.ext.genomes.scoring import reads_bases
from lightning_dilated.ext.genomes.variants import check_references
from lightning_dilated.ext.masked.mlm import LongNetMLM
from lightning_dilated.models import LongNetLM, TokenModel

COLUMNS = (
    *("chrom", "pos", "id", "ref", "alt", "score"),
    *("ref_log_likelihood", "alt_log_likelihood", "ref_bases", "alt_bases", "note"),
)
ABOUT = """
Score the variants of a VCF file: log-likelihood of the alternative allele minus the reference allele's, in nats.
A LongNetLM sums over a window around the variant, which has the same number of bases with either allele. A LongNetMLM
masks the sites that a substitution changes and compares the two alleles there. For an insertion or deletion it masks
one site at a time, from --flank bases before to --flank bases after, the same number of sites with either allele.
Multi-allelic lines have a row for each alternative. Alleles without bases have a row with a note and no score.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("lightning-dilated score", description=ABOUT)
    p.add_argument(
        "--ckpt_path", required=True, help="checkpoint, or folder of save_pretrained, of a LongNetLM or LongNetMLM"
    )
    p.add_argument("--vcf", required=True, help="the variants, plain or compressed by gzip")
    p.add_argument(
        "--fasta",
        required=True,
        nargs="+",
        help="the genome that the variants were called against, plain or compressed by gzip",
    )
    p.add_argument("--out", required=True, help="the CSV to write")
    p.add_argument("--window", type=int, help="bases around a variant (default: the model's max_seq_len)")
    p.add_argument(
        "--strands",
        choices=("forward", "reverse", "both"),
        default="forward",
        help="strands to read; both: the mean of both scores (default: %(default)s)",
    )
    p.add_argument("--flank", type=int, default=8, help="bases, for a LongNetMLM, see above (default: %(default)s)")
    p.add_argument("--batch_size", type=int, default=8, help="windows computed at a time (default: %(default)s)")
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    p.add_argument("--cache_dir", help="folder for unpacked gzip files (default: GenomeDataModule's)")
    return p


def run(argv: list[str]) -> None:
    """Load the model, check every variant against the genome, then score and write the variants batch by batch."""
    args = parser().parse_args(argv)
    for name, least in (("flank", 0), ("batch_size", 1)):
        integer(getattr(args, name), f"--{name}", least)
    check_device(args.device)
    model = genome_model(args.ckpt_path)
    window = window_of(model, args.window)
    variants = read_variants(args.vcf)
    genome = Genome(collect_files(args.fasta, hint="pass existing FASTA files in --fasta"), args.cache_dir)
    numbers = check_references(variants, genome, args.vcf)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    model.to(args.device)
    options = {"strands": args.strands, "flank": args.flank, "batch_size": args.batch_size}
    notes: Counter[str] = Counter()
    with out.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file, progress() as bar:
        writer, task = csv.writer(file), bar.add_task("variants", total=len(variants))
        writer.writerow(COLUMNS)
        size = max(1, args.batch_size // 2) if model.causal else args.batch_size
        for start in range(0, len(variants), size):
            batch = variants[start : start + size]
            for row in scored(model, genome, numbers, batch, window, options):
                writer.writerow(map(guarded_field, row))
                notes[str(row[-1])] += 1
            file.flush()  # finished rows survive a crash
            bar.advance(task, len(batch))
    print(report(out, notes))


def genome_model(path: str) -> TokenModel:
    """Load the model of a checkpoint. Raises ValueError for a model that does not read bases."""
    model = load_module(path)
    if not isinstance(model, (LongNetLM, LongNetMLM)) or not reads_bases(model):
        size = getattr(model, "vocab_size", None)
        raise ValueError(
            f"ckpt_path {path} holds a {type(model).__name__} with vocab_size {size}; scoring variants takes a LongNetLM or "
            "LongNetMLM of a genome (vocab_size 5: A C G T N), such as recipes/genome_mlm.yaml trains."
        )
    return model


def window_of(model: TokenModel, window: int | None) -> int:
    """Return the number of bases of a window: the option if given, else the model's length."""
    if window is not None:
        return integer(window, "--window", 2)
    if model.max_seq_len is None:
        raise ValueError(
            "the checkpoint does not record the length that the model was made for (max_seq_len): give --window, such as "
            "the data.seq_len that it was trained with."
        )
    return model.max_seq_len


def scored(
    model: TokenModel, genome: Genome, numbers: dict[str, int], batch: list[Variant], window: int, options: dict
) -> Iterator[list[object]]:
    notes, windows = [], []
    for v in batch:
        note, alleles = v.note, None
        if not note and v.ref.upper() == v.alt.upper():
            note = "alleles are equal"
        elif not note:
            alleles = allele_windows(genome, numbers[v.record], v.start, v.ref, v.alt, window)
            note = "" if alleles else f"alleles do not fit into a window of {window} bases"
        notes.append(note)
        windows += [alleles] if alleles else []
    result = model.score_alleles(windows, **options)
    values = zip(
        *(x.tolist() for x in (result.score, result.reference, result.alternative)),
        *(x.tolist() for x in (result.reference_bases, result.alternative_bases)),
        strict=True,
    )
    for v, note in zip(batch, notes, strict=True):
        numbers_of_row: list[object] = [""] * 5 if note else list(next(values))
        if not note and numbers_of_row[3] == numbers_of_row[4] == 0:
            numbers_of_row, note = [""] * 5, "no known base to score"
        yield [v.record, v.start + 1, v.name, v.ref, v.alt, *numbers_of_row, note]


def progress() -> Progress:
    """Return a progress bar on standard error, hidden unless that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not sys.stderr.isatty())


def report(out: Path, notes: Counter[str]) -> str:
    lines = [f"scores: {out} ({notes.total():,} alleles, {notes['']:,} of them scored)"]
    return "\n".join([*lines, *(f"not scored: {count:,}, {note}" for note, count in notes.items() if note)])
