"""HashedState: the rows of hashed heads that later tokens of a generation may read, found by code at a constant cost.

Shape letters: B batch, N tokens, C capacity, K kv heads, g query heads for each kv head, D head dim, G groups of M codes,
L latest rows, W places of a code, P codes that a query looks up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated.ext.hashed.functional import Options, compute
from lightning_dilated.ext.hashed.lookup import Inputs, Reads, attend, merge_lookups
from lightning_dilated.ext.hashed.order import codes
from lightning_dilated.ext.hashed.rows import HashedRows


class HashedState:
    """The rows of all tokens, and for each code the places of its last W rows. At first it has no rows.

    W is the least of L and the number of rows for which memory is allocated, so that a large L needs no memory before
    there are rows.

    Args:
        latest: L.
        k: (B, N, K, D), rows of the first call.
        z_k: (B, N, K, G, M), logits of these rows' codes.
        capacity: number of rows for which memory is allocated at first.
    """

    def __init__(self, latest: int, k: Tensor, z_k: Tensor, capacity: int = 0) -> None:
        self.latest, self.lengths = latest, [0] * len(k)
        (batch, _, heads), (groups, many) = z_k.shape[:3], z_k.shape[3:]
        self.rows = [x.new_zeros(batch, max(capacity, x.shape[1]), *x.shape[2:]) for x in (k, k, z_k)]
        # `places` (B, K, M ** G, W): indices of rows, as a ring; `counts`: how many rows had the code so far
        self.places = torch.zeros(batch, heads, many**groups, 0, dtype=torch.int32, device=k.device)
        self.counts = torch.zeros(batch, heads, many**groups, dtype=torch.int64, device=k.device)
        self._make_room(0)

    def before(self, code: Tensor) -> HashedRows:
        """Return the rows that lookups of codes (B, n, K, P) read; the rows of a code are in the order of positions."""
        looked_up = torch.zeros_like(self.counts, dtype=torch.bool)
        looked_up.scatter_(2, code.transpose(1, 2).flatten(2), True).logical_and_(self.counts > 0)
        count, places = self.counts[looked_up], self.places[looked_up]
        width = places.shape[1]
        number = (count - width).clamp_min(0)[:, None] + torch.arange(width, device=count.device)
        is_row = number < count[:, None]
        place = places.gather(1, number % width)[is_row].long()
        sample, head, code = (x[:, None].expand_as(is_row)[is_row] for x in looked_up.nonzero().unbind(1))
        heads = self.counts.shape[1]
        keys = ((sample * heads + head) << 31) + code
        return HashedRows(len(self.counts), heads, keys, number[is_row], *(x[sample, place, head] for x in self.rows))

    def extend(self, k: Tensor, v: Tensor, z_k: Tensor, new: Sequence[int]) -> None:
        """Add the first new[b] of n tokens to each sample b: k, v (B, n, K, D) and z_k (B, n, K, G, M)."""
        (batch, size, heads), many, device = k.shape[:3], self.counts.shape[2], k.device
        self._make_room(size)
        width = self.places.shape[3]
        start = send(torch.tensor(self.lengths), device)
        sample, place = torch.arange(batch, device=device), start[:, None] + torch.arange(size, device=device)
        for stored, x in zip(self.rows, (k, v, z_k.softmax(-1)), strict=True):
            stored[sample[:, None], place] = x.to(stored.dtype)  # later tokens overwrite padding
        real = torch.arange(size, device=device) < send(torch.tensor(new), device)[:, None]
        head = torch.arange(batch * heads, device=device).view(batch, 1, heads)
        key = torch.where(real[..., None], head * many + codes(z_k)[..., 0], batch * heads * many)
        key, row = key.transpose(1, 2).flatten().sort(stable=True)
        counts = torch.bincount(key, minlength=batch * heads * many + 1)
        known = nn.functional.pad(self.counts.flatten(), (0, 1))
        number = torch.arange(len(key), device=device) - (counts.cumsum(0) - counts - known)[key]
        stays = (number >= (known + counts)[key] - width) & (key < batch * heads * many)
        key, number, row = key[stays], number[stays], row[stays]
        place = start[key // (heads * many)] + row % size
        self.places.view(-1)[key * width + number % width] = place.to(torch.int32)
        self.counts += counts[:-1].view_as(self.counts)
        self.lengths = [n + more for n, more in zip(self.lengths, new, strict=True)]

    def _make_room(self, new: int) -> None:
        """Allocate memory for this many new rows, and for their places. A code has W rows at most while W is below L."""
        size, needed = self.rows[0].shape[1], max(self.lengths) + new
        if needed > size:
            more = max(size, needed - size)
            self.rows = [torch.cat([x, x.new_zeros(len(x), more, *x.shape[2:])], 1) for x in self.rows]
        if (more := min(self.latest, self.rows[0].shape[1]) - self.places.shape[3]) > 0:
            self.places = nn.functional.pad(self.places, (0, more))

    def compute(self, tensors: Sequence[Tensor], new: Sequence[int], options: Options) -> Tensor:
        """Return the outputs (B, n, H, D) of n tokens, and add the first new[b] of them to each sample b.

        `tensors`: q, k, v, z_q, z_k and null of the tokens, as in `hashed_attention`; other tokens are padding.
        """
        _, k, v, z_q, z_k, _ = tensors
        samples, size = torch.arange(len(k))[:, None], k.shape[1]
        documents = torch.where(torch.arange(size) < torch.tensor(new)[:, None], samples, -1)
        before, longest = self.before(codes(z_q, options.probes)), max(self.lengths) + size
        result = compute(tensors, options, send(documents, k.device), sum(new), longest, before=before)
        self.extend(k, v, z_k, new)
        return result.out

    def add(self, k: Tensor, v: Tensor, z_k: Tensor, new: Sequence[int]) -> None:
        """Add new[b], 0 or 1, tokens to each sample b: k, v (B, 1, K, D) and z_k (B, 1, K, G, M)."""
        self._make_room(1)
        samples = torch.arange(len(k), device=k.device)
        place = send(torch.tensor(self.lengths), k.device)
        for stored, x in zip(self.rows, (k, v, z_k.softmax(-1)), strict=True):
            stored[samples, place] = x[:, 0].to(stored.dtype)
        code = codes(z_k)[:, 0]
        count = self.counts.gather(2, code)
        width = self.places.shape[3]
        flat, places = code * width + count % width, self.places.flatten(2)
        added = send(torch.tensor(new, dtype=torch.bool), k.device)[:, None, None]
        place = torch.where(added, place.to(torch.int32)[:, None, None], places.gather(2, flat))
        places.scatter_(2, flat, place)
        self.counts.scatter_add_(2, code, added.expand_as(code).long())
        self.lengths = [n + more for n, more in zip(self.lengths, new, strict=True)]

    def read(self, q: Tensor, z_q: Tensor, null: Tensor, probes: int, scale: float) -> Tensor:
        """Return the outputs (B, 1, H, D) of the last token's queries q (B, 1, H, D), with z_q (B, 1, K, G, M)."""
        batch, heads = len(q), z_q.shape[2]
        code = codes(z_q, probes)[:, 0]  # (B, K, P)
        places = self.places.gather(2, code[..., None].expand(-1, -1, -1, self.places.shape[3])).long()
        reads = torch.arange(self.places.shape[3], device=q.device) < self.counts.gather(2, code)[..., None]
        sample, head = (torch.arange(n, device=q.device) for n in (batch, heads))
        dtype = torch.promote_types(q.dtype, torch.float32)
        rows = [x[sample[:, None, None, None], places, head[:, None, None]].flatten(0, 2).to(dtype) for x in self.rows]
        queries = (q[:, 0].unflatten(1, (heads, -1)), z_q[:, 0].softmax(-1))
        many = [x[:, :, None].expand(-1, -1, probes, -1, -1).flatten(0, 2)[:, None].to(dtype) for x in queries]
        read = attend(Inputs(many[0], *rows[:2], many[1], rows[2]), reads.flatten(0, 2)[:, None], scale, True)
        read = Reads(*(x.view(batch, 1, heads, probes, *x.shape[2:]) for x in read))
        return merge_lookups(read, null.to(dtype).view(heads, -1))[0].to(q.dtype)

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
