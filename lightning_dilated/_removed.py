"""The tables of public names, commands and settings that were removed, each with its replacement."""

from __future__ import annotations

_LONGVIT = "The examples of torchscale run its weights; for slides, embed tiles and take SlideEncoder."
_VERSIONS = "benchmarks/version_pairs.py of the repository writes the same files, which TokenDataModule reads."
_STRAINS = "benchmarks/strain_pairs.py of the repository has the DataModule, benchmarks/pairs_distance.py trains on it."

#: {class or function: its replacement}
NAMES = {
    "LongViT": _LONGVIT,
    "image_patches": _LONGVIT,
    "ListOpsDataModule": "Read Long Range Arena's files by a DataModule of yours, or take FarRecallDataModule.",
    "StrainPairsDataModule": _STRAINS,
    "VersionPairs": _VERSIONS,
    "simulate": "planning.step_on_ranks has the seconds of a step on many ranks, in closed form.",
    "write_version_pairs": _VERSIONS,
}
#: {command, with or without its subcommand: its replacement}
COMMANDS = {"bench attention": "benchmarks/attention.py of the repository measures the op.", "pairs": _VERSIONS}
#: {file name or key of a recipe, or option of a command: its replacement}
KEYS = {
    "generate --devices": "One device reads the prompt, a chunk at a time: leave the option out.",
    "int8_weights": "It gained no time: draw with the model's own weights, in bfloat16 if memory is short.",
    "plan --find-max": "Leave it out: plan prints the longest sequence of each setting, and its memory is right to 0.1 %. "
    "benchmarks/find_max.py of the repository tries lengths by true steps.",
    "seq_len_schedule": "Train with a shorter data.seq_len first, and continue from these weights with a longer one.",
    "strain_pairs.yaml": _STRAINS,
    "version_pairs.yaml": _VERSIONS,
}


def removed(name: str, table: dict[str, str] = KEYS) -> str | None:
    """Return a message with the replacement of a removed name; None for a name that is not in the table."""
    return f"{name} was taken out of lightning_dilated. {table[name]}" if name in table else None


def removed_name(path: str) -> str | None:
    """Return the message for a removed class or function, from its name or its path in any version of the package."""
    return removed(path.rpartition(".")[2], NAMES) if path.startswith("lightning_dilated.") or "." not in path else None
