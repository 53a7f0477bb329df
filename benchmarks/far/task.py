"""The task: pairs of a key and a value, and the keys asked again far away, in a haystack of filler, noise or text.

Letters: B batch, N tokens, V keys and as many values, C pairs, A asked positions of a sequence.

Tokens 0 to H - 1 are the haystack's, H to H + V - 1 the keys, H + V to H + 2 V - 1 the values. H is 1 for the filler, 64
for noise, 256 for the bytes of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

KINDS = {"filler": 1, "noise": 64, "text": 256}


@dataclass
class Task:
    """Sizes of the task, and where its haystack comes from."""

    haystack: str = "noise"
    keys: int = 2048
    per_pair: int = 64
    most_pairs: int = 1024
    device: str = "cpu"
    text: str | None = None

    def __post_init__(self) -> None:
        if self.haystack not in KINDS:
            raise ValueError(f"haystack is {self.haystack!r}; take one of {', '.join(KINDS)}")
        if (self.haystack == "text") != (self.text is not None):
            raise ValueError(
                f"haystack is {self.haystack!r} and text is {self.text!r}: a text, and only a text, needs --text FILE"
            )
        self.first = KINDS[self.haystack]
        self.vocabulary = self.first + 2 * self.keys
        self.bytes = None
        if self.text is not None:
            data = bytearray(Path(self.text).read_bytes())
            self.bytes = torch.frombuffer(data, dtype=torch.uint8).to(self.device)

    def hay(self, batch: int, size: int, gen: torch.Generator, training: bool) -> Tensor:
        """(B, N) tokens; of a text, training reads the first nine tenths and tests the last."""
        if self.bytes is None:
            return torch.randint(0, self.first, (batch, size), generator=gen, device=self.device)
        border = len(self.bytes) * 9 // 10
        begin, end = (0, border) if training else (border, len(self.bytes))
        if end - begin < size:
            raise ValueError(
                f"the part of {self.text} has {end - begin:,} bytes, and a sequence {size:,}: take a longer text"
            )
        start = torch.randint(begin, end - size + 1, (batch, 1), generator=gen, device=self.device)
        return self.bytes[start + torch.arange(size, device=self.device)].long()

    def places(self, batch: int, room: int, count: int, gen: torch.Generator) -> Tensor:
        """(B, count) beginnings of runs of 2 tokens in `room` places, without overlap, in no order."""
        slots = torch.rand(batch, (room - 1) // 2, generator=gen, device=self.device).argsort(1)
        if slots.shape[1] < count:
            raise ValueError(f"{count} pairs do not fit into {room} tokens: lower the pairs, or the queries a pair")
        phase = torch.randint(0, 2, (batch, 1), generator=gen, device=self.device)
        return slots[:, :count] * 2 + phase

    def draw(
        self, size: int, batch: int, gen: torch.Generator, repeats: int = 1, training: bool = True
    ) -> tuple[Tensor, ...]:
        """(B, N) tokens; (B, A) asked positions, answers, distances to the pair. Each key is asked `repeats` times."""
        count, half, device = min(size // self.per_pair, self.most_pairs, self.keys), size // 2, self.device
        tokens, rows = self.hay(batch, size, gen, training), torch.arange(batch, device=device)[:, None]
        key = torch.rand(batch, self.keys, generator=gen, device=device).argsort(1)[:, :count]
        value = torch.randint(0, self.keys, (batch, count), generator=gen, device=device)
        again = torch.randint(0, count, (batch, (repeats - 1) * count), generator=gen, device=device)
        which = torch.cat([torch.arange(count, device=device).expand(batch, -1), again], 1)
        pair = self.places(batch, half, count, gen)
        asked = self.places(batch, half, which.shape[1], gen) + half
        for at, pairs in ((pair, torch.arange(count, device=device).expand(batch, -1)), (asked, which)):
            tokens[rows, at] = self.first + key.gather(1, pairs)
            tokens[rows, at + 1] = self.first + self.keys + value.gather(1, pairs)
        return tokens, asked, self.first + self.keys + value.gather(1, which), asked - pair.gather(1, which)


class Stream:
    """One sequence of the task in chunks; noise is made where it is read, so that a billion tokens need no memory."""

    def __init__(self, task: Task, size: int, chunk: int, seed: int) -> None:
        if task.haystack == "text" or size % chunk:
            raise ValueError(
                f"a stream has a haystack of noise or filler and whole chunks; got {task.haystack} and {size} / {chunk}"
            )
        self.task, self.size, self.chunk, self.seed = task, size, chunk, seed
        gen = torch.Generator(task.device).manual_seed(seed)
        count, half, device = min(size // task.per_pair, task.most_pairs, task.keys), size // 2, task.device
        key = torch.randperm(task.keys, generator=gen, device=device)[:count] + task.first
        self.answers = torch.randint(0, task.keys, (count,), generator=gen, device=device) + task.first + task.keys
        # one run in each of `count` equal parts of a half, in another order in the second
        part = half // count
        inside = lambda: torch.randint(0, part - 1, (count,), generator=gen, device=device)  # noqa: E731
        parts = torch.arange(count, device=device) * part
        self.pairs = (parts + inside())[torch.randperm(count, generator=gen, device=device)]
        self.asked = parts + inside() + half
        at = torch.cat([self.pairs, self.asked])
        self.at = torch.cat([at, at + 1])
        self.tokens = torch.cat([key, key, self.answers, self.answers])

    def read(self, start: int) -> Tensor:
        """(1, chunk) tokens from `start` on."""
        gen = torch.Generator(self.task.device).manual_seed(self.seed * 1_000_003 + start // self.chunk + 1)
        tokens = self.task.hay(1, self.chunk, gen, False)
        here = (self.at >= start) & (self.at < start + self.chunk)
        tokens[0, self.at[here] - start] = self.tokens[here]
        return tokens

    def asked_in(self, start: int) -> tuple[Tensor, Tensor]:
        """Asked positions of a chunk, counted from its start, and their answers."""
        here = (self.asked >= start) & (self.asked < start + self.chunk)
        return self.asked[here] - start, self.answers[here]
