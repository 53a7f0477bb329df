"""Names that the strategies' options take."""

from __future__ import annotations

from typing import Literal

Exchange = Literal["auto", "gather", "ring", "butterfly", "switch", "hierarchical_gather", "hierarchical_butterfly"]
Layout = Literal["contiguous", "zigzag", "strided"]
