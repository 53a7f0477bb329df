"""The files of checkpoint folders: manifests with checksums, the rename that commits a folder, the newest valid folder.

A checkpoint is written under a name that begins with a dot, with the manifest as the last file, and then renamed. So a
folder without the dot is complete, and a killed job leaves folders with the dot. This module reads no tensors.
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

from lightning_dilated.checkpoint.ranks import RankGroup, reason

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(step-\d{8,})\.(partial|removed|replaced)")
#: the reported problem of a checkpoint that ShardedCheckpoint(keep_finite=True) wrote after the loss was NaN
NOT_FINITE = "holds parameters that are not finite (NaN or infinity)"


def name_of(step: int) -> str:
    """Return the name of the folder for the checkpoint of step `step`."""
    return f"step-{step:08d}"


def unfinished(path: Path) -> Path:
    """Return the temporary path under which the checkpoint `path` is written."""
    return _aside(path, "partial")


def checksum(path: Path) -> str:
    """Return the blake2b digest of a file: 16 bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def file_entries(path: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return {name: {size, checksum}} of files in a folder."""
    return {name: {"size": (path / name).stat().st_size, "blake2b": checksum(path / name)} for name in sorted(names)}


@dataclass(frozen=True)
class SavedFolder:
    """A checkpoint's folder and its manifest; `broken` is the reason why the manifest cannot be read.

    Args:
        written: time of writing in nanoseconds since 1970; checkpoints are ordered by it, not by step.
        finite: False if a check found parameters that are not finite numbers.
    """

    path: Path
    step: int
    written: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    broken: str | None = None
    finite: bool = True

    @classmethod
    def read(cls, path: Path) -> SavedFolder:
        """Read the manifest; if that fails, take step and time from the folder."""
        manifest = path / MANIFEST
        try:
            if manifest.exists() and not manifest.is_file():  # reading a pipe would block
                raise ValueError("it is no regular file")
            entries = json.loads(manifest.read_text())
            if entries.pop("blake2b") != manifest_digest(entries):
                raise ValueError("its own checksum differs")
            _check(entries)
            return cls(path, entries["step"], entries["written"], entries["files"], finite=entries.get("finite", True))
        except FileNotFoundError:
            broken = f"{manifest} is missing"
        except RecursionError:
            broken = f"{manifest} cannot be read (it is nested too deeply)"
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            broken = f"{manifest} cannot be read ({reason(error)})"
        named = _NAME.fullmatch(path.name)
        written = path.stat().st_mtime_ns if path.exists() else 0
        return cls(path, int(named[1]) if named else 0, written, broken=broken)

    def quick_damage(self) -> str | None:
        """Return a description of the first file that is missing or has a wrong size; None if there is none."""
        if self.broken:
            return self.broken
        for name, entry in self.files.items():
            path = self.path / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != entry["size"]:
                return f"{path} has {path.stat().st_size:,} bytes in place of {entry['size']:,}"
        return None

    def damage(self, peers: RankGroup) -> str | None:
        """Return a description of the damage, or None. Every rank must call this; each checks a part of the files."""
        return next((problem for problem in peers.gather(self._damage(peers)) if problem), None)

    def _damage(self, peers: RankGroup) -> str | None:
        try:
            wrong = self.quick_damage()
            for name in sorted(self.files)[peers.rank :: peers.size] if wrong is None else ():
                if checksum(self.path / name) != self.files[name]["blake2b"]:
                    return f"{self.path / name} has other bytes than were written (its checksum differs)"
            return wrong
        except OSError as error:
            return f"{self.path} cannot be read ({reason(error)})"


def _check(manifest: dict[str, Any]) -> None:
    """Raise ValueError if a manifest has a value that `commit` would not write, such as one of a wrong type."""
    for name in ("step", "written"):
        if type(manifest[name]) is not int:
            raise ValueError(f"{name} is {manifest[name]!r:.60}, not a number")
    if type(manifest.get("finite", True)) is not bool:
        raise ValueError(f"finite is {manifest['finite']!r:.60}, not true or false")
    if not isinstance(manifest["files"], dict):
        raise ValueError("files is no mapping")
    for name, entry in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"files names {name!r:.60}, which is not in this folder")
        if not isinstance(entry, dict) or type(entry["size"]) is not int or type(entry["blake2b"]) is not str:
            raise ValueError(f"files does not give size and blake2b of {name}")


def listed(folder: Path) -> list[SavedFolder]:
    """Return the checkpoints in a folder, including damaged ones, newest first; [] if the folder does not exist."""
    if not folder.is_dir():
        return []
    saved = [SavedFolder.read(path) for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(saved, key=lambda saved: (saved.written, saved.step), reverse=True)


def newest_valid(folder: Path, peers: RankGroup) -> tuple[SavedFolder | None, list[str]]:
    """On all ranks, return the newest undamaged checkpoint with finite parameters, and the problems of newer ones."""
    problems = []
    for saved in peers.gather(listed(folder) if peers.rank == 0 else None)[0] or []:
        problem = saved.damage(peers) or (None if saved.finite else f"{saved.path} {NOT_FINITE}")
        if problem is None:
            return saved, problems
        problems.append(problem)
    return None, problems


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder is one checkpoint, possibly damaged, and not a folder of several checkpoints."""
    has_files = any((path / name).exists() for name in (MANIFEST, ".metadata", "meta.pt"))
    return path.is_dir() and (has_files or _NAME.fullmatch(path.name) is not None)


def find_valid(path: Path, peers: RankGroup) -> tuple[Path, list[str]]:
    """Return the checkpoint to load from a path, and the problems of newer checkpoints; every rank must call this.

    If the path is one checkpoint, return the path. The checkpoint must be valid, but is not checked if another program
    wrote it without a manifest. If the path is a folder of several checkpoints, return the newest valid one.

    Raises:
        FileNotFoundError: for a folder without a checkpoint.
        ValueError: for a damaged checkpoint, naming the file; for a folder in which all checkpoints are damaged.
    """
    if peers.gather(is_checkpoint(path))[0]:
        if not peers.gather((path / MANIFEST).exists() or _NAME.fullmatch(path.name) is not None)[0]:
            return path, []
        problem = SavedFolder.read(path).damage(peers)
        if problem is None:
            return path, []
        valid = newest_valid(path.parent, peers)[0]
        advice = f"The newest undamaged one is {valid.path}." if valid else "No other one in its folder is undamaged."
        raise ValueError(f"the checkpoint {path} is damaged: {problem}. {advice}")
    saved, problems = newest_valid(path, peers)
    if saved is None and not problems:
        raise FileNotFoundError(f"{path} is no checkpoint, and contains no checkpoint such as {name_of(100)}.")
    if saved is None:
        raise ValueError(none_valid(path, problems))
    return saved.path, problems


def none_valid(folder: Path, problems: list[str]) -> str:
    """Return the error message for a folder in which every checkpoint is damaged or contains NaN or infinity."""
    kind, remedy = "whole", "Restore the files, or take"
    if any(problem.endswith(NOT_FINITE) for problem in problems):
        kind, remedy = "whole and finite", "A ckpt_path that names one of them loads it nevertheless; or take"
    return (
        f"none of the {len(problems)} checkpoints in {folder} is {kind}: {'; '.join(problems)}. {remedy} another folder to "
        "start anew."
    )


def commit(path: Path, step: int, files: dict[str, dict[str, Any]], ranks: int, finite: bool = True) -> None:
    """Write the manifest of the checkpoint at `unfinished(path)`, and rename the folder to `path`."""
    newest = max((saved.written for saved in listed(path.parent)), default=0)
    manifest: dict[str, Any] = {"format": 1, "step": step, "ranks": ranks, "files": files, "finite": finite}
    manifest["written"] = max(time.time_ns(), newest + 1)  # newer than all others, even if clocks differ
    manifest["blake2b"] = manifest_digest(manifest)
    with (unfinished(path) / MANIFEST).open("w") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync(unfinished(path))
    if path.is_symlink():
        path.unlink()
    elif path.is_file():  # not a checkpoint: rename it, but do not delete it
        path.rename(path.with_name(f"{path.name}.file"))
    elif path.exists():  # an earlier run's folder, which cannot be replaced in one operation
        remove(_aside(path, "replaced"))
        path.rename(_aside(path, "replaced"))
    unfinished(path).rename(path)
    _sync(path.parent)
    with contextlib.suppress(OSError):
        remove(_aside(path, "replaced"))


def prune(folder: Path, keep: int) -> None:
    """Remove the checkpoints that are older than the `keep` newest complete ones.

    A checkpoint with parameters that are not finite does not count, and is removed unless it is the newest of all.
    """
    complete = 0
    for i, saved in enumerate(listed(folder)):
        if complete >= keep or (i > 0 and not saved.finite):
            removed = _aside(saved.path, "removed")  # a half removed checkpoint would look damaged under its own name
            with contextlib.suppress(OSError):
                remove(removed)
                saved.path.rename(removed)  # renames a link itself, not its target
                remove(removed)
        complete += saved.finite and saved.quick_damage() is None


def remove(path: Path) -> None:
    """Remove a folder, file or link if it exists; do not remove the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(folder: Path) -> list[str]:
    """Remove what a killed job half wrote or half removed, and restore a checkpoint that it was replacing.

    Return the names of the half written checkpoints.
    """
    half_written = []
    for path in sorted(folder.iterdir()):
        leftover = _LEFT.fullmatch(path.name)
        is_folder = path.is_dir() and not path.is_symlink()
        if leftover and leftover[2] == "replaced" and is_folder and not os.path.lexists(folder / leftover[1]):
            path.rename(folder / leftover[1])
        elif leftover:
            remove(path)
            half_written += [leftover[1]] if leftover[2] == "partial" and is_folder else []
    return half_written


def _aside(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")


def manifest_digest(entries: dict[str, Any]) -> str:
    """Return the checksum of a manifest's entries, to store in the manifest itself."""
    return hashlib.blake2b(json.dumps(entries, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk, if the file system supports this."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)
