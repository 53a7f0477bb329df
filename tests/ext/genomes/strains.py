"""Made-up strains: random genomes, mutated copies of them, and FASTA files."""

from pathlib import Path

import numpy as np

COMPLEMENT = str.maketrans("ACGTN", "TGCAN")


def made(size: int, seed: int = 0) -> str:
    """A genome of random bases."""
    return "".join(np.array(list("ACGT"))[np.random.default_rng(seed).integers(0, 4, size)])


def mutated(genome: str, share: float, seed: int, indels: bool = True) -> str:
    """A copy in which `share` of the bases differ: of those a tenth are deleted and a tenth have a base put before them."""
    draw = np.random.default_rng(seed)
    bases = np.array(list(genome))
    at = np.flatnonzero(draw.random(len(bases)) < share)
    kinds = draw.random(len(at)) if indels else np.ones(len(at))
    codes = np.searchsorted(list("ACGT"), bases[at])
    bases[at] = np.array(list("ACGT"))[(codes + draw.integers(1, 4, len(at))) % 4]
    out = bases.astype("<U2")
    out[at[kinds < 0.1]] = ""
    longer = at[(kinds >= 0.1) & (kinds < 0.2)]
    out[longer] = np.char.add(np.array(list("ACGT"))[draw.integers(0, 4, len(longer))], out[longer])
    return "".join(out)


def reverse_complement(bases: str) -> str:
    """The other strand."""
    return bases.translate(COMPLEMENT)[::-1]


def write_strain(folder: Path, name: str, *records: str) -> str:
    """A FASTA file of records r0, r1, ... in lines of 60 bases; its path."""
    lines = []
    for number, bases in enumerate(records):
        lines += [f">r{number}", *(bases[i : i + 60] for i in range(0, len(bases), 60))]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)
