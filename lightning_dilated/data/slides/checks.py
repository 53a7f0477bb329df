"""What SlideDataModule checks before training: files against the csv, sizes, and many faults told in one error.

Shape letters: F features of a tile.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from lightning_dilated.data.paths import HINT
from lightning_dilated.data.slides.files import H5, PT, EmptySlide, Slide, slide_name
from lightning_dilated.data.slides.labels import Row

#: faults that one error tells of
SHOWN = 5


@dataclass
class Found:
    """What `SlideDataModule.check` found, in one order.

    `by_column`: the csv says the splits; `largest`: the largest coordinate of each slide.
    """

    slides: list[Slide]
    splits: list[str]
    by_column: bool
    labels: list[int] | list[float] | None
    classes: list[str] | None
    largest: list[int] = field(default_factory=list)


def matched(
    files: dict[str, str], rows: list[Row] | None, csv: str, leave_out: bool
) -> tuple[list[str], list[Row] | None]:
    """Files and their rows, in the order of the files; what has no partner is an error, or is left out with a warning."""
    if rows is None:
        return list(files.values()), None
    of = {row.slide: row for row in rows}
    faults = [f"{csv}, line {row.line}: no file is called {row.slide}" for row in rows if row.slide not in files]
    faults += [f"{path} has no line in {csv}" for name, path in files.items() if name not in of]
    both = [name for name in files if name in of]
    if faults and not leave_out:
        remedy = "mend names, data.paths or the csv, or set data.unmatched to 'leave_out'"
        raise ValueError(f"{_told('slides lack a file or a label', faults)}\nTo go on, {remedy}")
    if not both:
        raise ValueError(f"no file of data.paths is named in {csv}; the first of each: {faults[0]}; {faults[-1]}")
    if faults:
        warnings.warn(_told("slides are left out", faults), stacklevel=3)
    return [files[name] for name in both], [of[name] for name in both]


def inspected(
    look: Any, files: list[str], rows: list[Row] | None, leave_out: bool
) -> tuple[list[Slide], list[Row] | None]:
    """What `look` says of each file, and the rows; slides without a tile are an error, or are left out with a warning."""
    empty: list[str] = []

    def one(path: str) -> Slide | None:
        try:
            return look(path)
        except EmptySlide as error:
            if not leave_out:
                raise
            empty.append(str(error).split(":")[0])
            return None

    found = each("slides cannot be used", one, files)
    if len(empty) == len(files):
        raise ValueError(f"none of the {len(files)} slides has a tile, the first is {files[0]}: extract them again")
    if empty:
        warnings.warn(_told("slides without a tile are left out", empty), stacklevel=3)
    slides = [slide for slide in found if slide is not None]
    if rows is not None:
        rows = [row for row, slide in zip(rows, found, strict=True) if slide is not None]
    return slides, rows


def check_sizes(slides: list[Slide], max_tiles: int | None) -> None:
    """Raise ValueError where slides differ in F, or one has more than `max_tiles` tiles."""
    other = next((s for s in slides if s.width != slides[0].width), None)
    if other is not None:
        raise ValueError(
            f"{slides[0].path} has {slides[0].width} features a tile, but {other.path} has {other.width}: all slides "
            "must come from one tile encoder"
        )
    longest = max(slides, key=lambda s: s.tiles)
    if max_tiles is not None and longest.tiles > max_tiles:
        count = sum(s.tiles > max_tiles for s in slides)
        raise ValueError(
            f"{count} of {len(slides)} slides have more than data.max_tiles = {max_tiles} tiles, the most "
            f"{longest.path} with {longest.tiles}: raise data.max_tiles, or set data.over to 'sample'"
        )


def one_tile_size(slides: list[Slide], given: int | None) -> int | None:
    """The side of a tile that `given` and all slides agree on; None where nobody says. Raises ValueError for two of them."""
    said = {s.tile_size: s.path for s in reversed(slides) if s.tile_size}
    if given is not None and set(said) - {given}:
        size, path = next((x, y) for x, y in said.items() if x != given)
        raise ValueError(
            f"{path} says that its tiles are {size} level-0 pixels wide, but data.tile_size is {given}: set it to {size}, "
            "or to null"
        )
    if len(said) > 1:
        told = ", ".join(f"{path} says {size}" for size, path in sorted(said.items()))
        raise ValueError(
            f"slides have tiles of different level-0 widths ({told}), so one model would place them differently: train on "
            "slides of one magnification, or cut the tiles anew"
        )
    return given if given is not None else next(iter(said), None)


def about_slides(look: Any, *args: Any) -> Any:
    """`look`, which speaks of byte files, with what slides need in its errors."""
    try:
        return look(*args)
    except (OSError, TypeError, ValueError) as error:
        hint = "pass existing .h5 or .pt files, directories or globs in data.paths"
        raise type(error)(str(error).replace(HINT, hint)) from None


def by_name(files: list[str]) -> dict[str, str]:
    """{slide: file}; ValueError for a file of another kind, or two of one name."""
    found: dict[str, str] = {}
    for file in files:
        if not file.lower().endswith((*H5, *PT)):
            raise ValueError(f"{file} is no slide file: data.paths takes files ending in {', '.join((*H5, *PT))}")
        other = found.setdefault(slide_name(file), file)
        if other != file:
            raise ValueError(f"{other} and {file} are both slide {slide_name(file)!r}: leave one out of data.paths")
    return found


def each(what: str, look: Any, things: list[Any]) -> list[Any]:
    """`look` at each, and one error for all of the ValueErrors."""
    out, faults = [], []
    for thing in things:
        try:
            out.append(look(thing))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError(faults[0] if len(faults) == 1 else _told(what, faults))
    return out


def _told(what: str, faults: list[str]) -> str:
    """A count, and the first few."""
    more = f"\nand {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{len(faults)} {what}:\n" + "\n".join(faults[:SHOWN]) + more
