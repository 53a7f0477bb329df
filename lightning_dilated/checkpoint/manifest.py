"""Checkpoint folders as files: a manifest of checksums, a rename that makes them whole, and the newest one that is good.

A checkpoint is written under a name that begins with a dot, its manifest last, and then renamed; so what bears a name of
its own is whole, and what a killed job left is known by the dot. Nothing here reads a tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dilated.checkpoint.ranks import Peers, reason

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(step-\d{8,})\.(partial|removed|replaced)")
_BLOCK = 1 << 22
#: what is wrong with a checkpoint that ShardedCheckpoint(keep_finite=True) wrote after a loss was NaN
NOT_FINITE = "holds parameters that are not finite (NaN or infinity)"


def name_of(step: int) -> str:
    """The folder of the checkpoint at a step."""
    return f"step-{step:08d}"


def partial(path: Path) -> Path:
    """Where the checkpoint `path` is written before it is whole."""
    return path.with_name(f".{path.name}.partial")


def checksum(path: Path) -> str:
    """blake2b of a file, 16 bytes in hexadecimals."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def facts(path: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{name: size and checksum} of files in a folder."""
    return {name: {"size": (path / name).stat().st_size, "blake2b": checksum(path / name)} for name in sorted(names)}


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder and what its manifest says; `broken` tells why that cannot be read.

    Args:
        written: when, in nanoseconds since 1970; later ones are newer, whatever their step.
        finite: whether all parameters were finite numbers, as far as that was looked at.
    """

    path: Path
    step: int
    written: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    broken: str | None = None
    finite: bool = True

    @classmethod
    def read(cls, path: Path) -> Saved:
        """From the manifest; without one, from the folder's name and time."""
        manifest = path / MANIFEST
        try:
            if manifest.exists() and not manifest.is_file():  # a pipe would be waited for
                raise ValueError("it is no regular file")
            told = json.loads(manifest.read_text())
            if told.pop("blake2b") != _seal(told):
                raise ValueError("its own checksum differs")
            _check(told)
            return cls(path, told["step"], told["written"], told["files"], finite=told.get("finite", True))
        except FileNotFoundError:
            broken = f"{manifest} is missing"
        except RecursionError:
            broken = f"{manifest} cannot be read (it is nested too deeply)"
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            broken = f"{manifest} cannot be read ({reason(error)})"
        named = _NAME.fullmatch(path.name)
        written = path.stat().st_mtime_ns if path.exists() else 0
        return cls(path, int(named[1]) if named else 0, written, broken=broken)

    def seen(self) -> str | None:
        """What is wrong with the folder as far as names and sizes show it, naming the file; None if nothing."""
        if self.broken:
            return self.broken
        for name, told in self.files.items():
            path = self.path / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != told["size"]:
                return f"{path} has {path.stat().st_size:,} bytes in place of {told['size']:,}"
        return None

    def damage(self, peers: Peers) -> str | None:
        """What is wrong with the folder, its bytes included; each rank reads a share of the files, all must call."""
        return next((words for words in peers.gather(self._damage(peers)) if words), None)

    def _damage(self, peers: Peers) -> str | None:
        try:
            wrong = self.seen()
            for name in sorted(self.files)[peers.rank :: peers.size] if wrong is None else ():
                if checksum(self.path / name) != self.files[name]["blake2b"]:
                    return f"{self.path / name} has other bytes than were written (its checksum differs)"
            return wrong
        except OSError as error:
            return f"{self.path} cannot be read ({reason(error)})"


def _check(told: dict[str, Any]) -> None:
    """Raise ValueError for values of another kind than `finish` writes."""
    for name in ("step", "written"):
        if type(told[name]) is not int:
            raise ValueError(f"{name} is {told[name]!r:.60}, not a number")
    if type(told.get("finite", True)) is not bool:
        raise ValueError(f"finite is {told['finite']!r:.60}, not true or false")
    if not isinstance(told["files"], dict):
        raise ValueError("files is no mapping")
    for name, facts_of in told["files"].items():
        if Path(name).name != name:
            raise ValueError(f"files names {name!r:.60}, which is not in this folder")
        kinds = (int, str) if isinstance(facts_of, dict) else ()
        if not kinds or any(type(facts_of[x]) is not kind for x, kind in zip(("size", "blake2b"), kinds, strict=True)):
            raise ValueError(f"files does not give size and blake2b of {name}")


def listed(folder: Path) -> list[Saved]:
    """The checkpoints in a folder, damaged ones too, the newest first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    found = [Saved.read(path) for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda saved: (saved.written, saved.step), reverse=True)


def newest_whole(folder: Path, peers: Peers) -> tuple[Saved | None, list[str]]:
    """(the newest checkpoint without damage and with finite parameters, what is wrong with those newer than it).

    All ranks must call, and agree.
    """
    told = []
    for saved in peers.gather(listed(folder) if peers.rank == 0 else None)[0] or []:
        wrong = saved.damage(peers) or (None if saved.finite else f"{saved.path} {NOT_FINITE}")
        if wrong is None:
            return saved, told
        told.append(wrong)
    return None, told


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, or was one before it was damaged, and not a folder of several."""
    held = any((path / name).exists() for name in (MANIFEST, ".metadata", "meta.pt"))
    return path.is_dir() and (held or _NAME.fullmatch(path.name) is not None)


def to_load(path: Path, peers: Peers) -> tuple[Path, list[str]]:
    """(the checkpoint that a path means, what is wrong with newer ones); all ranks must call.

    A folder of one checkpoint is itself: it has to be whole, unless another program wrote it, without a manifest. A folder
    of several is the newest whole one.

    Raises:
        FileNotFoundError: for a folder that holds no checkpoint.
        ValueError: for a damaged checkpoint, naming the file; for a folder in which all are.
    """
    if peers.gather(is_checkpoint(path))[0]:
        if not peers.gather((path / MANIFEST).exists() or _NAME.fullmatch(path.name) is not None)[0]:
            return path, []
        wrong = Saved.read(path).damage(peers)
        if wrong is None:
            return path, []
        raise ValueError(f"the checkpoint {path} is damaged: {wrong}. {_beside(path, peers)}")
    saved, told = newest_whole(path, peers)
    if saved is None and not told:
        raise FileNotFoundError(f"{path} is no checkpoint, and holds none ({name_of(100)} and the like).")
    if saved is None:
        raise ValueError(nothing_good(path, told))
    return saved.path, told


def nothing_good(folder: Path, told: list[str]) -> str:
    """The words for a folder in which every checkpoint is damaged."""
    kind, remedy = "whole", "Restore the files, or take"
    if any(words.endswith(NOT_FINITE) for words in told):
        kind, remedy = "whole and finite", "A ckpt_path that names one of them loads it nevertheless; or take"
    return (
        f"none of the {len(told)} checkpoints in {folder} is {kind}: {'; '.join(told)}. {remedy} another folder to start "
        "anew."
    )


def _beside(path: Path, peers: Peers) -> str:
    """What may be taken in place of a damaged checkpoint."""
    good = newest_whole(path.parent, peers)[0]
    return f"The newest whole one beside it is {good.path}." if good else "There is no whole one beside it."


def finish(path: Path, step: int, files: dict[str, dict[str, Any]], ranks: int, finite: bool = True) -> None:
    """Write the manifest of the checkpoint that lies under `partial(path)`, and make it `path`."""
    newest = max((saved.written for saved in listed(path.parent)), default=0)
    told: dict[str, Any] = {"format": 1, "step": step, "ranks": ranks, "files": files, "finite": finite}
    told["written"] = max(time.time_ns(), newest + 1)  # whatever clocks say, this one is newer
    told["blake2b"] = _seal(told)
    with (partial(path) / MANIFEST).open("w") as file:
        file.write(json.dumps(told, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync(partial(path))
    if path.is_symlink():
        path.unlink()
    elif path.is_file():  # nothing of ours: it makes room, and stays
        path.rename(path.with_name(f"{path.name}.file"))
    elif path.exists():  # of an earlier run: a folder in use cannot be replaced in one go
        remove(_aside(path, "replaced"))
        path.rename(_aside(path, "replaced"))
    partial(path).rename(path)
    _sync(path.parent)
    with contextlib.suppress(OSError):
        remove(_aside(path, "replaced"))


def prune(folder: Path, keep: int) -> None:
    """Remove what is older than the `keep` newest checkpoints that look whole.

    Those whose parameters are not finite do not count, and only the newest of all checkpoints may be one.
    """
    whole = 0
    for i, saved in enumerate(listed(folder)):
        if whole >= keep or (i > 0 and not saved.finite):
            gone = _aside(saved.path, "removed")  # half removed it would look damaged
            with contextlib.suppress(OSError):
                remove(gone)
                saved.path.rename(gone)  # a link itself, not what it leads to
                remove(gone)
        whole += saved.finite and saved.seen() is None


def remove(path: Path) -> None:
    """Remove a folder or file, if it is there; of a link the link only."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(folder: Path) -> list[str]:
    """Remove what a killed job left half written or half removed; what it was about to replace is put back.

    Returns the names of those that were half written.
    """
    unfinished = []
    for path in sorted(folder.iterdir()):
        left = _LEFT.fullmatch(path.name)
        whole = path.is_dir() and not path.is_symlink()
        if left and left[2] == "replaced" and whole and not os.path.lexists(folder / left[1]):
            path.rename(folder / left[1])
        elif left:
            remove(path)
            unfinished += [left[1]] if left[2] == "partial" and whole else []
    return unfinished


def _aside(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")


def _seal(told: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync(folder: Path) -> None:
    """Have the operating system write a folder's entries down; some file systems know no such thing."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)
