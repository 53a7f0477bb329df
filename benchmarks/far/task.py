"""The task: pairs of a key and a value, and questions for the keys far away, in a haystack of filler, noise or text.

Letters: B batch, N tokens, V keys and V values, C pairs, A asked positions of a sequence.

Tokens below H are for the haystack, the next V tokens are keys, and the last V tokens are values. H is 1 for the filler, 64
for noise, 256 for the bytes of a text. If keys have two tokens, second tokens are V more tokens between keys and values.
A full haystack consists of pairs only: the second half has the pairs of the first half in a different order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

KINDS = {"filler": 1, "noise": 64, "text": 256}


@dataclass
class Task:
    """Sizes of the task, and the kind of its haystack."""

    haystack: str = "noise"
    keys: int = 2048
    per_pair: int = 64
    most_pairs: int = 1024
    device: str = "cpu"
    text: str | None = None
    key_tokens: int = 1
    full: bool = False

    def __post_init__(self) -> None:
        if self.haystack not in KINDS:
            raise ValueError(f"haystack is {self.haystack!r}; take one of {', '.join(KINDS)}")
        if (self.haystack == "text") != (self.text is not None):
            raise ValueError(
                f"haystack is {self.haystack!r} and text is {self.text!r}: a text, and only a text, needs --text FILE"
            )
        self.first = KINDS[self.haystack]
        if self.key_tokens not in (1, 2) or (self.keys & (self.keys - 1) and self.key_tokens == 2):
            raise ValueError(
                f"key_tokens is {self.key_tokens} with {self.keys} keys; take 1, or 2 with a power of two of keys"
            )
        self.possible = self.keys**self.key_tokens
        self.values = self.first + self.key_tokens * self.keys
        self.vocabulary = self.values + self.keys
        self.bytes = None
        if self.text is not None:
            data = bytearray(Path(self.text).read_bytes())
            self.bytes = torch.frombuffer(data, dtype=torch.uint8).to(self.device)

    def hay(self, batch: int, size: int, gen: torch.Generator, training: bool) -> Tensor:
        """Return haystack tokens (B, N). Training reads the first nine tenths of a text, tests read the last tenth."""
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

    def keys_of(self, batch: int, count: int, gen: torch.Generator) -> Tensor:
        """Return the tokens of keys (B, count, 1 or 2). A sequence has each key at most once."""
        if self.key_tokens == 1:
            key = torch.rand(batch, self.keys, generator=gen, device=self.device).argsort(1)[:, :count]
            return self.first + key[..., None]
        first, step, factor = (
            torch.randint(0, self.possible, (batch, 1), generator=gen, device=self.device) for _ in "abc"
        )
        key = first + (2 * step + 1) * torch.arange(count, device=self.device)  # an odd step makes keys unique
        for _ in range(2):  # mix: otherwise all second tokens would differ, and one token would identify its pair
            key = key % self.possible
            key = (key ^ key // self.keys) * (2 * factor + 1)
        key = key % self.possible
        return self.first + torch.stack([key // self.keys, self.keys + key % self.keys], -1)

    def places(self, batch: int, room: int, count: int, gen: torch.Generator) -> Tensor:
        """Return starts (B, count) of a key and its value in `room` positions, without overlap, in random order."""
        run = self.key_tokens + 1
        spare = 0 if self.full else run - 1
        slots = torch.rand(batch, (room - spare) // run, generator=gen, device=self.device).argsort(1)
        if slots.shape[1] < count:
            raise ValueError(f"{count} pairs do not fit into {room} tokens: lower the pairs, or the queries a pair")
        phase = torch.randint(0, spare + 1, (batch, 1), generator=gen, device=self.device)
        return slots[:, :count] * run + phase

    def draw(
        self, size: int, batch: int, gen: torch.Generator, repeats: int = 1, training: bool = True
    ) -> tuple[Tensor, ...]:
        """Return tokens (B, N), and asked positions, answers and distances (B, A), on average `repeats` per key."""
        half, device, last = size // 2, self.device, self.key_tokens - 1
        count = half // (last + 2) if self.full else min(size // self.per_pair, self.most_pairs)
        count, repeats = min(count, self.possible), 1 if self.full else repeats
        tokens, rows = self.hay(batch, size, gen, training), torch.arange(batch, device=device)[:, None]
        key = self.keys_of(batch, count, gen)
        value = torch.randint(0, self.keys, (batch, count), generator=gen, device=device)
        again = torch.randint(0, count, (batch, (repeats - 1) * count), generator=gen, device=device)
        which = torch.cat([torch.arange(count, device=device).expand(batch, -1), again], 1)
        pair = self.places(batch, half, count, gen)
        asked = self.places(batch, half, which.shape[1], gen) + half
        for at, pairs in ((pair, torch.arange(count, device=device).expand(batch, -1)), (asked, which)):
            for i in range(self.key_tokens):
                tokens[rows, at + i] = key[..., i].gather(1, pairs)
            tokens[rows, at + last + 1] = self.values + value.gather(1, pairs)
        return tokens, asked + last, self.values + value.gather(1, which), asked - pair.gather(1, which)


class Stream:
    """One sequence of the task in chunks. Noise is generated when it is read, so a billion tokens need no memory."""

    def __init__(self, task: Task, size: int, chunk: int, seed: int) -> None:
        if task.haystack == "text" or size % chunk or task.key_tokens > 1 or task.full:
            raise ValueError(
                "a stream has keys of one token, a haystack of noise or filler and whole chunks; got "
                f"{task.key_tokens} tokens a key, {'pairs' if task.full else task.haystack} and {size} / {chunk}"
            )
        self.task, self.size, self.chunk, self.seed = task, size, chunk, seed
        gen = torch.Generator(task.device).manual_seed(seed)
        count, half, device = min(size // task.per_pair, task.most_pairs, task.keys), size // 2, task.device
        key = torch.randperm(task.keys, generator=gen, device=device)[:count] + task.first
        self.answers = torch.randint(0, task.keys, (count,), generator=gen, device=device) + task.first + task.keys
        # each of the `count` equal parts of a half has one key and its value; the halves differ in their order
        part = half // count
        inside = lambda: torch.randint(0, part - 1, (count,), generator=gen, device=device)  # noqa: E731
        parts = torch.arange(count, device=device) * part
        self.pairs = (parts + inside())[torch.randperm(count, generator=gen, device=device)]
        self.asked = parts + inside() + half
        at = torch.cat([self.pairs, self.asked])
        self.at = torch.cat([at, at + 1])
        self.tokens = torch.cat([key, key, self.answers, self.answers])

    def read(self, start: int) -> Tensor:
        """Return (1, chunk) tokens from `start`."""
        gen = torch.Generator(self.task.device).manual_seed(self.seed * 1_000_003 + start // self.chunk + 1)
        tokens = self.task.hay(1, self.chunk, gen, False)
        here = (self.at >= start) & (self.at < start + self.chunk)
        tokens[0, self.at[here] - start] = self.tokens[here]
        return tokens

    def asked_in(self, start: int) -> tuple[Tensor, Tensor]:
        """Return the asked positions in a chunk, relative to its start, and their answers."""
        here = (self.asked >= start) & (self.asked < start + self.chunk)
        return self.asked[here] - start, self.answers[here]
