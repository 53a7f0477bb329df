"""A transformer with local heads and far heads, for whole sequences or chunk by chunk.

Letters: B batch, N tokens, E width, H heads, D head dim, W taps, w local segment length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import codes
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAR = ("codes", "dense", "rotary", "window")
BASE = 1e7


@dataclass
class Sizes:
    """The sizes of a model.

    far_layer, also: index of a layer with a far head, and indices of other layers that have one.
    start: name of the initial weights of the convolutions from which codes are computed.
    alike: whether the code projections of queries and of keys start with the same weights.
    std: initial standard deviation of the embedding, which does not change initial logits. None: as in other matrices.
    sharp: root mean square to which the code logits of a group are scaled; None: unscaled.
    query_taps: whether the far head's queries pass through a convolution, as its keys and values do.
    """

    vocabulary: int
    far: str = "codes"
    far_layer: int = 0
    depth: int = 4
    width: int = 256
    heads: int = 4
    groups: int = 4
    codes: int = 16
    latest: int = 64
    before: float = 1.0
    start: str = "pair"
    alike: bool = False
    std: float | None = None
    sharp: float | None = None
    query_taps: bool = False
    also: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.far not in FAR:
            raise ValueError(f"far is {self.far!r}; take one of {', '.join(FAR)}")
        if not 0 <= min(self.far_layers) <= max(self.far_layers) < self.depth:
            raise ValueError(f"far layers are {self.far_layers}, but layers are 0 to {self.depth - 1}")

    @property
    def far_layers(self) -> tuple[int, ...]:
        return (self.far_layer, *self.also)


@dataclass
class Settings:
    """Settings that may change between steps: local segment length, lookups per query, and whether all rows are read.

    sample: number of positions per sequence at which taught codes have losses. The far head is then a dense head without
    a null key. 0: losses are computed at all asked positions, and there is a null key.
    """

    local: int = 2048
    probes: int = 1
    soft: bool = False
    taught: bool = False
    sample: int = 0


@dataclass
class Carried:
    """A layer's state between chunks: last inputs of convolutions, last local rows, and the far head's rows."""

    tails: dict[str, Tensor] = field(default_factory=dict)
    rows: codes.Rows | None = None


@dataclass
class Call:
    """Arguments of a layer besides its input. `aux` collects the far head's losses and counts."""

    settings: Settings
    asked: Tensor
    start: int
    carried: Carried | None
    aux: dict[str, Tensor]

    def collect(
        self, agree: Tensor, contrast: Tensor, chances: Tensor, asking: Tensor, rows: Tensor | None = None
    ) -> None:
        """Add a far head's losses, and the number of rows that it read, to the sums over earlier layers.

        `balance` covers all rows, `spread` covers the asked queries. Without `spread`, all asked keys might share a code.
        """
        losses = {"agree": agree.mean(), "contrast": contrast.mean(), "balance": codes.balance(chances)}
        losses["spread"] = codes.balance(asking.softmax(-1))
        for name, value in (losses if rows is None else {**losses, "rows": rows}).items():
            self.aux[name] = self.aux[name] + value if name in self.aux else value


def chosen(x: Tensor, at: Tensor) -> Tensor:
    """Return the entries (B, A, …) of x (B, N, …) at positions (B, A)."""
    return x[torch.arange(len(x), device=x.device)[:, None], at]


def convolve(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Return (B, N, C): at p, the sum over taps i of weight_i x_(p - i). The W - 1 rows `before` precede x."""
    taps, size = len(weight), x.shape[1]
    x, weight = torch.cat([before, x], 1), weight.to(x.dtype)
    out = x[:, taps - 1 :] * weight[0]
    for i in range(1, taps):
        out = out + x[:, taps - 1 - i : taps - 1 - i + size] * weight[i]
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, N, H, D) by angles, given as cosines and sines (N, 1, D / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


@lru_cache(maxsize=8)
def angles(size: int, first: int, period: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (N, 1, D / 2) of rotary angles at positions first, first + 1, ... modulo a period."""
    positions = (torch.arange(size, device=device) + first) % period
    rate = BASE ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angle = positions[:, None, None] * rate
    return angle.cos().float(), angle.sin().float()


class Taps(nn.Module):
    """A causal depthwise convolution of rows (B, N, C)."""

    def __init__(self, channels: int, start: tuple[float, ...] = (1, 0, 0, 0)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start, dtype=torch.float32)[:, None].repeat(1, channels))

    def forward(self, x: Tensor, carried: Carried | None, name: str) -> Tensor:
        """Convolve x, which continues the last rows of the previous chunk."""
        size = len(self.weight) - 1
        new = carried is None or name not in carried.tails
        before = x.new_zeros(len(x), size, x.shape[2]) if new else carried.tails[name]
        if carried is not None:
            carried.tails[name] = torch.cat([before, x], 1)[:, -size:]
        return convolve(x, self.weight, before)


class Layer(nn.Module):
    """Attention, with an optional far head as its last head, and an MLP."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        width, self.sizes, self.index = sizes.width, sizes, index
        self.dim, self.shifted = width // sizes.heads, index % 2
        self.far = sizes.far if index in sizes.far_layers and sizes.far != "window" else None
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.taps = Taps(2 * width)
        if index in sizes.far_layers:  # in all arms, the far head's keys initially include the previous token
            self.taps.weight.data[1, width - self.dim : width] = sizes.before
        self.far_taps = Taps(self.dim) if sizes.query_taps and index in sizes.far_layers else None
        if self.far == "codes":
            queries, keys = {
                "pair": ((1, 0, 0, 0), (1, sizes.before, 0, 0)),
                "trigram": ((1, 0.8, 0.6, 0), (0, 1, 0.8, 0.6)),
            }[sizes.start]
            self.query_taps, self.key_taps = Taps(width, queries), Taps(width, keys)
            self.query_code = nn.Linear(width, sizes.groups * sizes.codes, bias=False)
            self.key_code = nn.Linear(width, sizes.groups * sizes.codes, bias=False)
            self.null = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """Apply the layer to x (B, N, E)."""
        y = self.norm1(x)
        q, k, v = self.qkv(y).chunk(3, -1)
        k, v = self.taps(torch.cat([k, v], -1), call.carried, "kv").chunk(2, -1)
        if self.far_taps is not None:  # convolve the queries of the last head, in all arms
            last = self.far_taps(q[..., -self.dim :], call.carried, "q")
            q = torch.cat([q[..., : -self.dim], last], -1)
        heads = [z.unflatten(-1, (self.sizes.heads, self.dim)) for z in (q, k, v)]
        if self.far is None:
            out = self.local(*heads, call.settings.local, call.carried)
        else:
            near = self.local(*(z[:, :, :-1] for z in heads), call.settings.local, call.carried)
            far = [z[:, :, -1] for z in heads]
            far = self.hashed(y, *far, call) if self.far == "codes" else self.dense(*far, call.carried)
            out = torch.cat([near, far[:, :, None].to(near.dtype)], 2)
        x = x + self.out(out.flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def local(self, q: Tensor, k: Tensor, v: Tensor, width: int, carried: Carried | None) -> Tensor:
        """Attend in segments of `width`, which odd layers shift by half. Chunks begin at multiples of `width`."""
        size, half = q.shape[1], width // 2 if self.shifted else 0
        width = min(width, size) if not half else width
        # only the distances within a segment matter, so positions restart in each segment
        turned = angles(size, half, width, self.dim, q.device)
        q, k = turn(q, *turned), turn(k, *turned)
        if not half:
            return self.segments(q, k, v, width)
        if carried is None or "local" not in carried.tails:
            first = self.segments(*(z[:, :half] for z in (q, k, v)), half)
            remainder = self.aligned(*(z[:, half:] for z in (q, k, v)), width) if size > half else first[:, :0]
            result = torch.cat([first, remainder], 1)
        else:
            before_k, before_v = carried.tails["local"]
            k, v = torch.cat([before_k, k], 1), torch.cat([before_v, v], 1)
            q = torch.cat([torch.zeros_like(q[:, :half]), q], 1)
            result = self.aligned(q, k, v, width)[:, half:]
        if carried is not None:
            carried.tails["local"] = torch.stack([k[:, -half:], v[:, -half:]])
        return result

    def aligned(self, q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        """Attend within whole segments, and within the shorter rest."""
        whole = q.shape[1] // width * width
        parts = [(slice(0, whole), width), (slice(whole, None), q.shape[1] - whole)]
        return torch.cat([self.segments(q[:, s], k[:, s], v[:, s], n) for s, n in parts if n and q[:, s].shape[1]], 1)

    @staticmethod
    def segments(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        """Compute causal attention of (B, N, H, D) within segments of `width` tokens."""
        width = min(width, q.shape[1])
        cut = [z.unflatten(1, (-1, width)).flatten(0, 1).transpose(1, 2) for z in (q, k, v)]
        out = F.scaled_dot_product_attention(*cut, is_causal=True)
        return out.transpose(1, 2).unflatten(0, (len(q), -1)).flatten(1, 2)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, carried: Carried | None) -> Tensor:
        """Attend to all rows j <= p, with rotary positions or without."""
        if carried is not None:
            raise ValueError(f"a far head {self.far!r} keeps all rows; chunks are for codes")
        q, k, v = (z[:, :, None] for z in (q, k, v))
        if self.far == "rotary":
            turned = angles(q.shape[1], 0, q.shape[1], self.dim, q.device)
            q, k = turn(q, *turned), turn(k, *turned)
        return self.segments(q, k, v, q.shape[1])[:, :, 0]

    def hashed(self, y: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Read rows that have the query's codes. With `settings.taught`, the scores of soft steps do not depend on codes.

        The losses `agree` and `contrast` are means over the asked positions. Reads at other positions do not affect the
        answers, and losses of these reads would make all codes equal.
        """
        sizes, carried, at = self.sizes, call.carried, call.asked
        cut = (sizes.groups, sizes.codes)
        taught = call.settings.soft and call.settings.taught
        y = y.detach() if taught else y
        z_q = self.query_code(self.query_taps(y, carried, "query")).float().unflatten(-1, cut)
        z_k = self.key_code(self.key_taps(y, carried, "key")).float().unflatten(-1, cut)
        if sizes.sharp is not None:
            z_q, z_k = (F.rms_norm(z, cut[1:]) * sizes.sharp for z in (z_q, z_k))
        chances = z_k.softmax(-1)
        query = torch.cat([q, z_q.softmax(-1).flatten(2).to(q.dtype)], -1)
        packed = torch.cat([k, v, chances.flatten(2).to(k.dtype)], -1)
        if taught and call.settings.sample:
            at = torch.randint(q.shape[1], (len(q), call.settings.sample), device=q.device)
            call.collect(*codes.mix(self.sampled(query, packed, at), self.null)[1:], chances, chosen(z_q, at))
            return self.dense(q, k, v, None)
        if call.settings.soft:
            read = codes.soft(query, packed, self.dim, sizes.groups, taught).shaped(1, *q.shape[:2])
        else:
            read = self.look_up(query, packed, z_q, codes.numbers(z_k), call)
        out, agree, contrast = codes.mix(read, self.null)
        call.collect(agree.gather(1, at), contrast.gather(1, at), chances, chosen(z_q, at), read.count.sum(0))
        return out

    def sampled(self, query: Tensor, packed: Tensor, at: Tensor) -> codes.Read:
        """Let the queries at positions p of `at` (B, A) read all rows j <= p. Scores do not depend on codes.

        `match` and `chance` of the result pass no gradient to the scores.
        """
        allowed = at[..., None] >= torch.arange(packed.shape[1], device=at.device)
        parts = codes.attend(chosen(query, at), packed, allowed, self.dim, self.sizes.groups, True)
        return codes.Read(*parts, at + 1).shaped(1, *at.shape)

    def look_up(self, query: Tensor, packed: Tensor, z_q: Tensor, code: Tensor, call: Call) -> codes.Read:
        """Look up exactly, in rows with codes (B, N) and in rows of earlier chunks. Return results (P, B, N, …)."""
        sizes, probes, (batch, size) = self.sizes, call.settings.probes, code.shape
        sequence = torch.arange(batch, device=code.device)[:, None] * sizes.codes**sizes.groups
        position = (torch.arange(size, device=code.device) + call.start).repeat(batch)
        rows = codes.Rows((code + sequence).flatten(), position, packed.flatten(0, 1))
        if call.carried is not None and call.carried.rows is not None:
            rows = call.carried.rows.joined(rows)
        looked_up = (codes.probed(z_q, probes) + sequence).flatten()
        lookups = query.flatten(0, 1).expand(probes, -1, -1).flatten(0, 1)
        read = codes.exact(lookups, looked_up, position.repeat(probes), rows, sizes.latest, self.dim, sizes.groups)
        if call.carried is not None:
            call.carried.rows = rows.latest(sizes.latest)
        return read.shaped(probes, batch, size)


class Model(nn.Module):
    """Maps tokens to logits at some positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, i) for i in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)
        std = (2 / (5 * sizes.width)) ** 0.5
        self.scale = 1.0 if sizes.std is None else std / sizes.std
        for name, p in self.named_parameters():
            if p.ndim == 2 and "taps" not in name:
                residual = name.endswith(("out.weight", "fc2.weight"))
                nn.init.normal_(p, std=std / (2 * sizes.depth) ** 0.5 if residual else std)
        if sizes.std is not None:
            nn.init.normal_(self.embed.weight, std=sizes.std)
        for layer in self.layers:
            if layer.far == "codes" and sizes.alike:
                layer.key_code.weight.data.copy_(layer.query_code.weight.data)

    def forward(
        self, tokens: Tensor, asked: Tensor, settings: Settings, start: int = 0, carried: list[Carried] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (logits (B, A, vocabulary) at `asked` (B, A), losses and counts). A chunk begins at `start`."""
        x, aux = self.embed(tokens), {}
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        for i, layer in enumerate(self.layers):
            x = layer(x, Call(settings, asked, start, None if carried is None else carried[i], aux))
        x = x.gather(1, asked[..., None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.norm(x) * self.scale, self.embed.weight).float(), aux
