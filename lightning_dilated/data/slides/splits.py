"""How DataModules over files divide their data: shares of it, or files or names of their own for validation and test."""

from __future__ import annotations

from lightning_dilated.data.paths import HINT, collect_files, path_list
from lightning_dilated.data.values import fraction

#: share of validation, and of test, where nothing is said
SHARE = 0.05


def split_fractions(given: dict[str, float | None], own: dict[str, bool], by: str) -> dict[str, float]:
    """The shares of the "val" and "test" split.

    Args:
        given: of each split the user's `data.<split>_fraction`, or None. Left out, it is 0.05; and 0 as soon as one of
            the splits has data of its own, so that nothing is taken from the training data unasked.
        own: whether a split has data of its own.
        by: how that was said, such as "paths" for `data.val_paths`.

    Raises: TypeError or ValueError for a share outside [0, 1), for both a share and own data, and for shares that leave
        nothing to train on.
    """
    default = 0.0 if any(own.values()) else SHARE
    shares = {x: fraction(f"data.{x}_fraction", default if share is None else share) for x, share in given.items()}
    for split, share in shares.items():
        if own[split] and share > 0:
            raise ValueError(
                f"data.{split}_fraction is {share} and data.{split}_{by} is set too: a split is either a share of the data "
                f"or has data of its own; leave one of them out"
            )
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"data.val_fraction {shares['val']} and data.test_fraction {shares['test']} add up to 1 or more, which leaves "
            "nothing to train on: lower one of them"
        )
    return shares


def split_bounds(total: int, shares: dict[str, float]) -> dict[str, tuple[int, int]]:
    """[start, stop) of each split in `total` items: training first, then validation, then test."""
    val, test = int(total * shares["val"]), int(total * shares["test"])
    train = total - val - test
    return {"train": (0, train), "val": (train, train + val), "test": (train + val, total)}


def required_paths(name: str, paths: object) -> list[str]:
    """`paths` as a list of strings. Raises: TypeError or ValueError, naming `data.<name>`."""
    if paths is None:
        raise TypeError(f"data.{name} is None; {_hint(name)}")
    try:
        found = path_list(paths)
    except (TypeError, ValueError) as error:
        raise _renamed(error, name) from error
    assert found is not None
    return found


def files_of(name: str, paths: list[str], suffixes: list[str]) -> list[str]:
    """The files that `paths` stand for; of directories those ending in `suffixes`. Raises: as `collect_files`."""
    try:
        return collect_files(paths, suffixes)
    except (OSError, ValueError) as error:
        raise _renamed(error, name) from error


def name_list(name: str, value: object) -> list[str]:
    """A list of names from one name, a list of them or None. Raises: TypeError for anything else."""
    entries = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) and entry for entry in entries):
        raise TypeError(f"data.{name} is {value!r}; it must be a name, a list of names, or null")
    return list(entries)


def _hint(name: str) -> str:
    return f"pass existing files, directories or globs in data.{name}"


def _renamed(error: Exception, name: str) -> Exception:
    """The error in terms of this option: the hint of `paths` is that of bytes, which do without."""
    return type(error)(str(error).replace(HINT, _hint(name)).replace("data.paths", f"data.{name}"))
