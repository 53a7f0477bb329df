"""Links: speeds between ranks, for the planner's estimates, and the file of speeds measured on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_dilated._validation import real, text_of

#: environment variable: a file of links to read instead of the cached file; "defaults" means no file
VARIABLE = "LIGHTNING_DILATED_LINKS"
NUMBERS = ("near", "far", "round", "message")


@dataclass(frozen=True)
class Links:
    """Link speeds for prices: bytes/s of a GPU inside a node and between nodes, seconds for a round and for a message.

    The defaults are speeds of H200 nodes: 259 GB/s was measured for an all-to-all over NVLink, 50 GB/s is one 400 Gb/s
    adapter per GPU, and the round time is for a few bytes. `lightning-dilated bench links` measures your links.

    Attributes:
        near, far: bytes/s that a GPU receives from its own node, and from other nodes.
        round, message: seconds of an all-to-all, and of each message in it, in addition to the time of the bytes.
        source: origin of the numbers; ignored in comparisons.

    Raises:
        TypeError, ValueError: if a field is not a positive finite number. The message names it.
    """

    near: float = 259e9
    far: float = 50e9
    round: float = 40e-6
    message: float = 2e-6
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in NUMBERS:
            object.__setattr__(self, name, real(getattr(self, name), name, above=0))
        if not isinstance(self.source, str):
            raise TypeError(f"source must be text, got {self.source!r}.")
        if not self.source:
            usual = all(getattr(self, x.name) == x.default for x in fields(self) if x.name in NUMBERS)
            object.__setattr__(self, "source", "defaults" if usual else "given")

    def __str__(self) -> str:
        speeds = f"near {self.near / 1e9:.4g} GB/s, far {self.far / 1e9:.4g} GB/s"
        return f"{speeds}, {self.round * 1e6:.4g} us a round, {self.message * 1e6:.4g} us a message ({self.source})"

    @property
    def numbers(self) -> str:
        """The numbers with all digits, because they must be equal on all ranks."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in NUMBERS)

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Read a file that `save` wrote. If it names no source, the source is the path.

        Raises:
            TypeError: if `path` is not a path.
            OSError: if the file does not exist or cannot be read.
            ValueError: if a field is missing, unknown or not a positive number. The message names file and field.
        """
        if not isinstance(path, (str, Path)):
            raise TypeError(
                f"links must be the path of a file that `lightning-dilated bench links` wrote, got {path!r}."
            )
        remedy = f"`lightning-dilated bench links --output {path}` measures the links and writes them there."
        try:
            values = json.loads(text_of(path, "utf-8"))
        except OSError as error:
            raise type(error)(f"{path}: {error.strerror}. {remedy}") from None
        except (ValueError, RecursionError) as error:  # RecursionError: values nested too deeply
            raise ValueError(f"{path} is not JSON ({error}). {remedy}") from None
        try:
            return cls(**{"source": str(path), **_checked(values)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error} {remedy}") from None

    def save(self, path: str | Path) -> None:
        """Write a small JSON file atomically; create its folder."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:  # mode "x" follows no link
            file.write(json.dumps(asdict(self), indent=2) + "\n")
        part.replace(path)

    @classmethod
    def of_this_machine(cls) -> Links:
        """Read the file that LIGHTNING_DILATED_LINKS names, else the cached file; without a file, use the defaults.

        Raises:
            OSError, ValueError: as `load`. A file that the variable names must exist.
        """
        named = os.environ.get(VARIABLE)
        if named == "defaults":
            return cls()
        if named:
            try:
                return cls.load(named)
            except (OSError, ValueError) as error:
                raise type(error)(f"{VARIABLE}={named}: {error}") from None
        return cls.load(cached()) if os.path.isfile(cached()) else cls()


def cached() -> Path:
    """Return the file that `bench links` writes and `of_this_machine` reads, in $XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "lightning-dilated" / "links.json"


def _checked(values: Any) -> dict[str, Any]:
    """Return the values of a file; raise ValueError if a number is missing or a name is unknown."""
    if not isinstance(values, dict):
        raise ValueError(f"not a mapping of {', '.join(NUMBERS)}.")
    missing = [name for name in NUMBERS if name not in values]
    unknown = [name for name in values if name not in (*NUMBERS, "source")]
    for names, what in ((missing, "missing"), (unknown, "unknown")):
        if names:
            raise ValueError(f"{what}: {', '.join(names)}. A file of links holds {', '.join(NUMBERS)} and source.")
    return values
