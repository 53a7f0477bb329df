"""Record actual reads: every stretch of a file that a ByteStream copies out of its memory maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dilated.ext.files.files import ByteStream


class Touched:
    """Stores stretches (file name, first byte, end byte) in the order of the reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stretches: list[tuple[str, int, int]] = []
        real = ByteStream._map
        monkeypatch.setattr(ByteStream, "_map", lambda stream, index: _Map(real(stream, index), stream, index, self))

    def take(self) -> list[tuple[str, int, int]]:
        """Return the stretches that were read since the last call."""
        stretches, self.stretches = self.stretches, []
        return stretches

    def count(self) -> int:
        """Return the number of bytes read since the last call. A byte that is read twice counts twice."""
        return sum(stop - start for _, start, stop in self.take())


class _Map:
    def __init__(self, values: np.ndarray, stream: ByteStream, index: int, touched: Touched) -> None:
        self.values, self.name, self.touched = values, Path(stream.files[index]).name, touched

    def __getitem__(self, at: slice) -> Any:
        assert at.step is None
        self.touched.stretches.append((self.name, at.start, at.stop))
        return self.values[at]
