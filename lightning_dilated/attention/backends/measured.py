"""What was measured: where the triton engine is faster than cuDNN's calls, block by block.

`benchmarks/results/2026-11-21_h200_speed.md` has the rows. Change an entry to suit another machine; `engine=` overrides all.
"""

from __future__ import annotations

#: FLOPs of forward and backward of a block, on the mean of a call, below which the host's work for one call of cuDNN (about
#: 0.2 ms each way) takes longer than triton's kernels do; by compute capability
GROUPED_BELOW: dict[tuple[int, int], float] = {(9, 0): 1.0e11}
#: of any other
DEFAULT = 0.0
#: (query, key) pairs of a head up to which triton's forward, which goes on from the running result, is faster than cuDNN's
#: and a merge: what arrives from other ranks is merged so
CHAINED_UP_TO: dict[tuple[int, int], float] = {(9, 0): 2.0**24}
