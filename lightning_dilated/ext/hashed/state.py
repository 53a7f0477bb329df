"""HashedState: the rows of hashed heads that later tokens of a generation may read, found by code at a constant cost.

Shape letters: B batch, N tokens, C capacity, K kv heads, g query heads for each kv head, D head dim, G groups of M codes,
L latest rows, P codes that a query looks up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.ext.hashed.lookup import Inputs, Reads, attend, merge_lookups
from lightning_dilated.ext.hashed.order import codes


class HashedState:
    """The rows of all tokens, and for each code the places of its last L rows.

    Args:
        latest: L.
        lengths: (B,), the number of tokens of each sample.
        k, v: (B, N, K, D), rows of the prompt, which may have padding.
        z_k: (B, N, K, G, M), logits of the rows' codes.
        capacity: number of rows for which memory is allocated at first.
    """

    def __init__(
        self, latest: int, lengths: Sequence[int], k: Tensor, v: Tensor, z_k: Tensor, capacity: int = 0
    ) -> None:
        self.latest, self.lengths = latest, list(lengths)
        (batch, size, heads), (groups, many) = z_k.shape[:3], z_k.shape[3:]
        self.rows = [self._with_room(x, max(capacity, size)) for x in (k, v, z_k.softmax(-1))]
        # `places` (B, K, M ** G, L): indices of rows, as a ring; `counts`: how many rows had the code so far
        self.places = torch.zeros(batch, heads, many**groups, latest, dtype=torch.int32, device=k.device)
        self.counts = torch.zeros(batch, heads, many**groups, dtype=torch.int64, device=k.device)
        real = torch.arange(size) < torch.tensor(self.lengths)[:, None]
        self._file(codes(z_k)[..., 0], send(real, k.device))

    def _file(self, code: Tensor, real: Tensor) -> None:
        """Store the places of the prompt's rows; code (B, N, K), real (B, N)."""
        (batch, size, heads), many = code.shape, self.counts.shape[2]
        head = torch.arange(batch * heads, device=code.device).view(batch, 1, heads)
        key = torch.where(real[..., None], head * many + code, batch * heads * many).transpose(1, 2).flatten()
        counts = torch.bincount(key, minlength=batch * heads * many + 1)
        key, row = key.sort(stable=True)
        ordinal = torch.arange(len(key), device=key.device) - (counts.cumsum(0) - counts)[key]
        kept = (ordinal >= counts[key] - self.latest) & (key < batch * heads * many)
        self.places.view(-1)[(key * self.latest + ordinal % self.latest)[kept]] = (row % size)[kept].to(torch.int32)
        self.counts.copy_(counts[:-1].view_as(self.counts))

    @staticmethod
    def _with_room(x: Tensor, capacity: int) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), capacity - x.shape[1], *x.shape[2:])], 1)

    def add(self, k: Tensor, v: Tensor, z_k: Tensor, real: Sequence[bool]) -> None:
        """Add one token to each sample that is `real` (B,): k, v (B, 1, K, D) and z_k (B, 1, K, G, M)."""
        if max(self.lengths) == self.rows[0].shape[1]:
            self.rows = [self._with_room(x, 2 * x.shape[1]) for x in self.rows]
        samples = torch.arange(len(k), device=k.device)
        place = send(torch.tensor(self.lengths), k.device)
        for stored, x in zip(self.rows, (k, v, z_k.softmax(-1)), strict=True):
            stored[samples, place] = x[:, 0].to(stored.dtype)
        code = codes(z_k)[:, 0]
        count = self.counts.gather(2, code)
        flat, places = code * self.latest + count % self.latest, self.places.flatten(2)
        added = send(torch.tensor(real), k.device)[:, None, None]
        place = torch.where(added, place.to(torch.int32)[:, None, None], places.gather(2, flat))
        places.scatter_(2, flat, place)
        self.counts.scatter_add_(2, code, added.expand_as(code).long())
        self.lengths = [n + more for n, more in zip(self.lengths, real, strict=True)]

    def read(self, q: Tensor, z_q: Tensor, null: Tensor, probes: int, scale: float) -> Tensor:
        """Return the outputs (B, 1, H, D) of the last token's queries q (B, 1, H, D), with z_q (B, 1, K, G, M)."""
        batch, heads = len(q), z_q.shape[2]
        code = codes(z_q, probes)[:, 0]  # (B, K, P)
        places = self.places.gather(2, code[..., None].expand(-1, -1, -1, self.latest)).long()
        reads = torch.arange(self.latest, device=q.device) < self.counts.gather(2, code)[..., None]
        sample, head = (torch.arange(n, device=q.device) for n in (batch, heads))
        dtype = torch.promote_types(q.dtype, torch.float32)
        rows = [x[sample[:, None, None, None], places, head[:, None, None]].flatten(0, 2).to(dtype) for x in self.rows]
        queries = (q[:, 0].unflatten(1, (heads, -1)), z_q[:, 0].softmax(-1))
        many = [x[:, :, None].expand(-1, -1, probes, -1, -1).flatten(0, 2)[:, None].to(dtype) for x in queries]
        found = attend(Inputs(many[0], *rows[:2], many[1], rows[2]), reads.flatten(0, 2)[:, None], scale, True)
        found = Reads(*(x.view(batch, 1, heads, probes, *x.shape[2:]) for x in found))
        return merge_lookups(found, null.to(dtype).view(heads, -1))[0].to(q.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (*self.rows, self.places, self.counts))

    def select(self, samples: Sequence[int] | Tensor) -> HashedState:
        """Return a copy with the samples at these indices, in this order."""
        index = torch.as_tensor(samples, dtype=torch.int64)
        at, new = send(index, self.counts.device), object.__new__(HashedState)
        new.latest, new.lengths = self.latest, [self.lengths[i] for i in index.tolist()]
        new.rows = [x.index_select(0, at) for x in self.rows]
        new.places, new.counts = self.places.index_select(0, at), self.counts.index_select(0, at)
        return new
