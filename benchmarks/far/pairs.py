"""Two versions of source files as samples of bytes: N/2 bytes of old files, then N/2 of the same files, new version.

    python benchmarks/far/pairs.py pack corpus.bin --trees lib/python3.8 lib/python3.9 --more torch-2.11 torch-2.13
    python benchmarks/far/pairs.py look corpus.bin --size 65536

`pack` reads trees of versions, old to new, and writes the Python files that changed. A corpus is an xz file: a line of
JSON with each file's name and the lengths of its versions, and then their bytes. `look` prints how many bits per byte a
lookup without learning needs for held-out samples.

Letters: B batch, N bytes of a sample, K anchors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

#: smallest and largest number of bytes in a version of a file
LEAST, MOST = 500, 300_000
#: number of bytes of a line that must be equal, and unique, in both versions
LINE = 40


def held_out(name: str) -> bool:
    """Return whether a file is held out: one in 16, by a hash of name and folder, which is equal for all versions."""
    key = "/".join(name.split("/")[-2:])
    return hashlib.sha256(key.encode()).digest()[0] % 16 == 0


def pack(chains: Sequence[Sequence[Path]], more: Sequence[Sequence[Path]], out: Path) -> dict[str, int]:
    """Write the Python files of chains of trees, old to new, with their differing versions. `more` is for training."""
    header, texts, seen = [], [], set()
    for i, trees in enumerate([*chains, *more]):
        names = {str(p.relative_to(tree)) for tree in trees for p in tree.rglob("*.py")}
        for name in sorted(x for x in names if not x.startswith("site-packages")):
            found = [(tree / name).read_bytes() for tree in trees if (tree / name).is_file()]
            versions = [x for x, before in zip(found, [b"", *found], strict=False) if x != before]
            if len(versions) < 2 or versions[-1] in seen or not all(LEAST <= len(x) <= MOST for x in versions):
                continue
            held = held_out(f"{trees[-1].name}/{name}")
            if held and i >= len(chains):
                continue
            seen.add(versions[-1])
            header.append([f"{trees[-1].name}/{name}", held, [len(x) for x in versions]])
            texts += versions
    with lzma.open(out, "wb", preset=1) as file:
        file.write(json.dumps(header).encode() + b"\n" + b"".join(texts))
    return {"files": len(header), "versions": len(texts), "bytes": sum(map(len, texts)), "packed": out.stat().st_size}


def read(path: Path) -> list[list[tuple[bytes, bytes]]]:
    """Return two lists of pairs (old, new) of consecutive versions: pairs for training, and pairs that are held out.

    The first changes of all files come first, in the order of names, and then the second changes.
    """
    with lzma.open(path, "rb") as file:
        header, data = json.loads(file.readline()), memoryview(file.read())
    changes: list[dict[int, list[tuple[bytes, bytes]]]] = [{}, {}]
    begin = 0
    for _, held, lengths in header:
        versions = []
        for length in lengths:
            versions.append(bytes(data[begin : begin + length]))
            begin += length
        for i, pair in enumerate(pairwise(versions)):
            changes[held].setdefault(i, []).append(pair)
    return [[pair for i in sorted(split) for pair in split[i]] for split in changes]


class Pairs:
    """All old files end to end, all new files end to end, and the positions in both where a sample may begin."""

    def __init__(self, pairs: list[tuple[bytes, bytes]], device: str = "cpu") -> None:
        rng, starts, anchors, a, b = random.Random(0), [], [], 0, 0
        for old, new in pairs:
            starts.append((a, b))
            anchors += [(a + i, b + j) for i, j in same_lines(old, new, rng)]
            a, b = a + len(old), b + len(new)
        if not anchors:
            raise ValueError(f"no line occurs once in both versions of {len(pairs)} files: pack more files")
        self.starts, self.anchors = starts, torch.tensor(anchors, device=device)
        self.old, self.new = (
            torch.frombuffer(bytearray(b"".join(x)), dtype=torch.uint8).to(device) for x in zip(*pairs, strict=True)
        )

    def samples(self, at: Tensor, size: int) -> Tensor:
        """Return samples (B, N) from positions `at` (B, 2): old and new files. After the last byte follows the first."""
        reach = torch.arange(size // 2, device=at.device)
        halves = [x[(i[:, None] + reach) % len(x)] for x, i in zip((self.old, self.new), at.T, strict=True)]
        return torch.cat(halves, 1).long()

    def walk(self, size: int) -> Tensor:
        """Return the positions of samples that do not overlap. Each sample begins with a file."""
        places, room = [], (0, 0)
        for a, b in self.starts:
            fits = a + size // 2 <= len(self.old) and b + size // 2 <= len(self.new)
            if fits and a >= room[0] and b >= room[1]:
                places.append((a, b))
                room = (a + size // 2, b + size // 2)
        return torch.tensor(places, dtype=torch.long, device=self.old.device).view(-1, 2)


def same_lines(old: bytes, new: bytes, rng: random.Random) -> list[tuple[int, int]]:
    """Return (position in old, position in new) of some lines that occur once in each, about one per 2,000 bytes."""
    places = []
    for _ in range(1 + len(old) // 2000):
        i = old.find(b"\n", rng.randrange(len(old))) + 1
        line = old[i : i + LINE]
        if len(line) == LINE and old.count(line) == new.count(line) == 1:
            places.append((i, new.index(line)))
    return places


class Versions:
    """A task for `recall.train` that asks for every byte. A share `copies` of training samples has two equal halves."""

    def __init__(self, path: Path, device: str = "cpu", copies: float = 0.05) -> None:
        self.trained, self.held = (Pairs(pairs, device) for pairs in read(path))
        self.copies, self.vocabulary = copies, 256

    def draw(self, size: int, batch: int, gen: torch.Generator, repeats: int = 1) -> tuple[Tensor, ...]:
        """Return bytes (B, N), asked positions and next bytes (B, N - 1), and an empty tensor instead of distances."""
        pairs, device = self.trained, self.trained.anchors.device
        chosen = torch.randint(len(pairs.anchors), (batch,), generator=gen, device=device)
        tokens = pairs.samples(pairs.anchors[chosen], size)
        copied = torch.rand(batch, 1, generator=gen, device=device) < self.copies
        tokens[:, size // 2 :] = torch.where(copied, tokens[:, : size // 2], tokens[:, size // 2 :])
        return asked(tokens)


def asked(tokens: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes, all positions but the last, the next bytes, and an empty tensor instead of distances."""
    at = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
    return tokens, at, tokens[:, 1:], tokens[:, :0]


# -- without learning --------------------------------------------------------------------------------------------------
def trigrams(text: Tensor) -> Tensor:
    """Return the chance of each byte after two given bytes (256, 256, 256), smoothed with its chance after one."""
    x = text.long()
    two = torch.bincount(x[:-1] * 256 + x[1:], minlength=1 << 16).view(256, 256) + 0.01
    one = two / two.sum(-1, keepdim=True)
    three = torch.bincount((x[:-2] * 256 + x[1:-1]) * 256 + x[2:], minlength=1 << 24).view(256, 256, 256)
    return (three + 4 * one) / (three.sum(-1, keepdim=True) + 4)


def lookup_bits(sample: bytes, chances: Tensor, reach: int, context: int = 8) -> float:
    """Return bits per byte of the second half. The byte after the latest occurrence of the context is the prediction.

    After a hit, the byte that follows there is the next prediction. Its chance is the share of earlier predictions, after
    an equally long run of hits, that were right. Trigrams predict other bytes, and bytes from further back than `reach`.
    """
    table = chances[list(sample[:-2]), list(sample[1:-1]), list(sample[2:])].tolist()
    latest: dict[bytes, int] = {}
    right, tried = [1] * 33, [2] * 33
    at, run, bits = None, 0, 0.0
    begin = second(len(sample))
    for p in range(context, len(sample)):
        key = sample[p - context : p]
        at = latest.get(key) if at is None else at
        chance, hit = table[p - 2], False
        if at is not None and p - at <= reach:
            sure, hit = right[run] / tried[run], sample[at] == sample[p]
            chance = sure + (1 - sure) * chance if hit else (1 - sure) * chance
            right[run], tried[run] = right[run] + hit, tried[run] + 1
        at, run = (at + 1, min(32, run + 1)) if hit else (None, 0)
        latest[key] = p
        bits -= math.log2(chance) if p > begin else 0.0
    return bits / (len(sample) - 1 - begin)


def xz_bits(sample: bytes) -> float:
    """Return the bits per byte that the second half adds to the size of the first half compressed with xz."""
    size = [8 * len(lzma.compress(x)) for x in (sample, sample[: len(sample) // 2])]
    return (size[0] - size[1]) / (len(sample) // 2)


def second(size: int) -> int:
    """Return the first position that counts: an eighth of a half after the middle."""
    return size // 2 + size // 16


def spread_out(places: Tensor, count: int) -> Tensor:
    """Return at most `count` of the positions, evenly spaced."""
    return places[torch.linspace(0, len(places) - 1, min(count, len(places))).long()]


def look(path: Path, size: int, count: int) -> dict[str, object]:
    """Return the bits per byte that each yardstick pays for held-out samples.

    The yardsticks are xz and three lookups, which reach all bytes, a window and nothing.
    """
    trained, held = (Pairs(pairs) for pairs in read(path))
    chances = trigrams(trained.new[: 1 << 24])
    samples = [bytes(x.tolist()) for x in held.samples(spread_out(held.walk(size), count), size)]
    mean = lambda bits: round(sum(map(bits, samples)) / len(samples), 3)  # noqa: E731
    reach = {"all": size, "window": min(2048, size // 8), "none": 0}
    lookups = {name: mean(lambda x, most=most: lookup_bits(x, chances, most)) for name, most in reach.items()}
    return {"size": size, "samples": len(samples), **lookups, "xz": mean(xz_bits)}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("pack", "look"))
    p.add_argument("corpus", type=Path)
    p.add_argument("--trees", type=Path, nargs="+", action="append", help="versions of a tree, old to new")
    p.add_argument("--more", type=Path, nargs="+", action="append", default=[], help="the same, for training alone")
    p.add_argument("--size", type=int, default=65536)
    p.add_argument("--samples", type=int, default=8)
    a = p.parse_args(argv)
    done = pack(a.trees, a.more, a.corpus) if a.what == "pack" else look(a.corpus, a.size, a.samples)
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
