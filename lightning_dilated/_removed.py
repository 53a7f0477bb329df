"""The table of what was taken out: public names, commands and settings, each with what does its work now."""

from __future__ import annotations

_LONGVIT = "The examples of torchscale run its weights; for slides, embed tiles and take SlideEncoder."
_VERSIONS = "benchmarks/version_pairs.py of the repository writes the same files, which TokenDataModule reads."
_STRAINS = "benchmarks/strain_pairs.py of the repository has the DataModule, benchmarks/pairs_distance.py trains on it."

#: public name, below the package: what does its work now
NAMES = {
    "LongViT": _LONGVIT,
    "models.LongViT": _LONGVIT,
    "models.image_patches": _LONGVIT,
    "data.ListOpsDataModule": "Read Long Range Arena's files by a DataModule of yours, or take FarRecallDataModule.",
    "data.StrainPairsDataModule": _STRAINS,
    "data.VersionPairs": _VERSIONS,
    "data.write_version_pairs": _VERSIONS,
}
#: command: what does its work now
COMMANDS = {
    "bench attention": "benchmarks/attention.py of the repository measures the op.",
    "pairs": _VERSIONS,
}
#: key or name of a recipe, or option of a command: what does its work now
KEYS = {
    "generate --devices": "One device reads the prompt, a chunk at a time: leave the option out.",
    "int8_weights": "It gained no time: draw with the model's own weights, in bfloat16 if memory is short.",
    "strain_pairs.yaml": _STRAINS,
    "version_pairs.yaml": _VERSIONS,
}


def removed_name(path: str) -> str | None:
    """Name the replacement of a class or function that was taken out; None for other names.

    Args:
        path: a public name, a dotted path of any version of this package, or a class's name alone.
    """
    ours, name = path.startswith("lightning_dilated.") or "." not in path, path.rpartition(".")[2]
    return next((_say(name, said) for key, said in NAMES.items() if ours and name == key.rpartition(".")[2]), None)


def removed_command(words: list[str]) -> str | None:
    """Name the replacement of the command that these words begin with, if it was taken out."""
    return next((_say(x, COMMANDS[x]) for x in (words[0], " ".join(words[:2])) if x in COMMANDS), None)


def removed_key(name: str) -> str | None:
    """Name the replacement of a key, an option or a recipe, if it was taken out."""
    return _say(name, KEYS[name]) if name in KEYS else None


def _say(name: str, remedy: str) -> str:
    return f"{name} was taken out of lightning_dilated. {remedy}"
