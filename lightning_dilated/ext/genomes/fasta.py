"""GenomeDataModule: genomes in FASTA files as windows of bases, read from either strand.

Shape letters: B batch, N bases of a window (`seq_len`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from lightning_dilated._validation import one_of, real
from lightning_dilated.data.module import SPLITS, SequenceDataModule, split_bounds, split_fractions
from lightning_dilated.data.opener import CACHE_GIB, FileOpener
from lightning_dilated.ext.files.files import files_of, name_list, required_paths
from lightning_dilated.ext.genomes.bases import COMPLEMENTS, LETTERS, N_CODE
from lightning_dilated.ext.genomes.files import Genome, Record
from lightning_dilated.ext.genomes.regions import Region, read_bed

SUFFIXES = [x + y for x in (".fa", ".fna", ".fasta") for y in ("", ".gz")]


class GenomeDataModule(SequenceDataModule):
    """Genomes in FASTA files (.fa, .fna, .fasta, plain or .gz) as consecutive windows of bases.

    Batches are {"tokens": (B, N), "labels": (B, N), "index": (B,)}, all int64. Tokens are A 0, C 1, G 2, T 3, N 4;
    lower case (the soft mask) counts as upper case, U as T, and other IUPAC letters as N (an info line counts them). A
    label is the next base on the strand that is read, or -100 if that base is N or outside the split. Masked
        modelling ignores the labels. Bases after a record's last whole window are unused; `describe` counts them.

    N is an unknown base; assembly gaps are runs of N of up to megabases. By default (`n_policy="skip"`) windows with a
    share of N above `max_n_fraction` are left out; "token" keeps all windows. N is never a label.

    A plain file is read by range through its index, FILE.fai (as from `samtools faidx`). A missing index is written
    next to the file, or into `cache_dir` if that fails. A gzip file cannot be read by range: it is decompressed once,
    block by block, into `cache_dir`; a file that unpacks to more than 100 times its size (and 16 MiB) is refused.
    `check` reads every base once in every process (about 15 core seconds per gigabase). Later, ranks read only slices.

    Args:
        paths: files, directories (read recursively) or globs, or URLs of them.
        seq_len: N, number of bases of a window.
        batch_size: B, number of windows of a batch on each device.
        val_fraction, test_fraction: shares of each record, taken from its end; null is 0.05, or 0 if `val_names` or
            `test_names` is set. With a test_fraction of 1 everything is test data, for `predict` and `test`.
        val_names, test_names: names of records that are validation (or test) data as a whole.
        reverse_complement: share of the training windows that are read from the other strand, from 0 to 1; `seed`, the
            epoch and the window's number determine which. Validation and test read the file's strand.
        n_policy: "skip" or "token", as above.
        max_n_fraction: maximum share of N in a window under "skip", from 0 to 1.
        short: action for records shorter than a window: "error" raises; "skip" leaves them out and logs their names.
        val_limit: maximum number of windows of the validation split; null for all.
        cache_dir: null is `genomes` in the package's cache folder ($LIGHTNING_DILATED_CACHE, or lightning-dilated in
            $XDG_CACHE_HOME or ~/.cache). If missing, it is created for this user alone (mode 0700).
        cache_gib: maximum GiB of blocks of URLs there, see `FileOpener`; decompressed files are not counted.
        pack_tokens: null: no packing. A number turns packing on, and is the maximum number of bases in a batch on each
            device. Records shorter than a window, and bases after the last whole window of a record, then become
            samples of their own length (at least two bases). A batch is one row of packed samples: {"tokens": (1, n),
            "labels": (1, n), "cu_seqlens": (D + 1,) int32 on the CPU, the bounds of the D samples, "index": (D,)}.
        bed: a BED file, plain or .gz: only its regions are cut into windows, from a region's first base on; each base
            is in the split of its place in the record. A region with a strand is read on that strand (-: from its last
            base on), regardless of `reverse_complement`. `short` then applies to regions. Regions may overlap.
        predict_strands: strands that `predict` reads: "forward", the strand of the file or of the region; "reverse"; or
            "both", which gives two rows per window.
        seed, num_workers, pin_memory: see `SplitDataModule`.

    `predict` reads the test split. Its batches also contain the place of each window in the file, as lists and tensors
    (B,): `record`, `start`, `stop` (counted from 0, as in BED), `strand` (+ or -) and, with `bed`, the `region`'s name.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    vocab_size: int = len(LETTERS)
    unit = "windows"

    def __init__(
        self,
        paths: str | list[str],
        seq_len: int = 4096,
        batch_size: int = 1,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        val_names: str | list[str] | None = None,
        test_names: str | list[str] | None = None,
        reverse_complement: float = 0.5,
        n_policy: Literal["skip", "token"] = "skip",
        max_n_fraction: float = 0.1,
        short: Literal["error", "skip"] = "error",
        val_limit: int | None = None,
        cache_dir: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        pack_tokens: int | None = None,
        bed: str | None = None,
        predict_strands: Literal["forward", "reverse", "both"] = "forward",
        cache_gib: float = CACHE_GIB,
    ) -> None:
        super().__init__(seq_len, val_limit, batch_size, seed, num_workers, pin_memory, pack_tokens)
        self.opener = FileOpener(cache_dir, cache_gib)
        self.paths = required_paths(paths, "paths")
        self.names = {"val": name_list(val_names, "val_names"), "test": name_list(test_names, "test_names")}
        common = sorted({*self.names["val"]} & {*self.names["test"]})
        if common:
            raise ValueError(f"data.val_names and data.test_names both hold {common}: a record serves one split")
        separate = {split: bool(names) for split, names in self.names.items()}
        self.fractions = split_fractions({"val": val_fraction, "test": test_fraction}, separate, "names", True)
        self.reverse_complement = real(reverse_complement, "data.reverse_complement", least=0, most=1)
        self.max_n_fraction = real(max_n_fraction, "data.max_n_fraction", least=0, most=1)
        self.n_policy = one_of(n_policy, "data.n_policy", ("skip", "token"))
        self.short = one_of(short, "data.short", ("error", "skip"))
        self.cache_dir, self.bed = cache_dir, bed
        self.predict_strands = one_of(predict_strands, "data.predict_strands", ("forward", "reverse", "both"))
        self._genome: Genome | None = None
        self._bed_regions: list[Region] = []
        self._all_test: str | None = "data.test_fraction is 1" if self.fractions["test"] == 1 else None

    def check(self) -> None:
        """Index all files, read every base once, and check that each requested split has at least one window.

        Raises: OSError or ValueError with file, record and remedy; ImportError without pyfaidx.
        """
        if self._genome is not None:
            return
        genome = Genome(files_of(self.paths, "paths", SUFFIXES, self.opener), self.cache_dir, self.opener)
        self._check_names(genome.records)
        if self.names["test"] and {record.name for record in genome.records} <= {*self.names["test"]}:
            self._all_test = "data.test_names holds all records"
        short = self._short_ones(genome)
        if short and self.short == "error":
            self._refuse_short(short)
        datasets = {split: self._windows(genome, split) for split in SPLITS}
        for split, windows in datasets.items():
            if self.wanted(split) is None:
                self._check_split(split, windows)
        if self.wanted("train") is None:
            self.check_batch(len(datasets["train"]), 1)
        self._genome = genome
        self._log_summary(short)

    @property
    def genome(self) -> Genome:
        """The records of all files; they are read and checked on first use."""
        self.check()
        assert self._genome is not None
        return self._genome

    def dataset(self, split: str) -> GenomeWindows:
        one_of(split, "split", SPLITS)
        return self._windows(self.genome, split)

    def predict_dataset(self) -> PlacedWindows:
        """Return the test split, with the place of each window, on the strands of `predict_strands`."""
        return PlacedWindows(self.dataset("test"), self.predict_strands, self.bed is not None)

    def describe(self) -> str:
        """Return one line with the numbers of files, records, bases, windows of each split, and unused bases."""
        datasets, records = {split: self.dataset(split) for split in SPLITS}, self.genome.records
        counts = ", ".join(f"{len(windows):,} {split}" for split, windows in datasets.items())
        bases = sum(record.length for record in records)
        inside, regions = bases, ""
        if self.bed is not None:
            inside = sum(region.stop - region.start for region in self._bed_regions)
            regions = f"{len(self._bed_regions):,} regions of {inside:,} bases; "
        unused = inside - sum(windows.bases for windows in datasets.values())
        limit, whole = ("of", " whole") if self.pack_tokens is None else ("of up to", "")
        return (
            f"{len(self.genome.stream.files):,} files, {len(records):,} records, {bases:,} bases; {regions}windows {limit} "
            f"{self.seq_len:,}: {counts}; {unused:,} bases lie in no{whole} window, and "
            f"{sum(windows.left_out for windows in datasets.values()):,} windows were left out for their N"
        )

    def wanted(self, split: str) -> str | None:
        if split == "train":
            return None if self._all_test is None else f"{self._all_test}, so everything is test data"
        present = self.names[split] or self.fractions[split] > 0
        return None if present else f"data.{split}_fraction is 0; set it above 0, or set data.{split}_names"

    def _regions(self, records: list[Record], split: str) -> list[Region]:
        """Return a split's part of each record that is long enough, or of each region of the BED file."""
        regions = []
        for number, record in enumerate(records):
            bounds = split_bounds(record.length, self.fractions)
            for other, names in self.names.items():
                if record.name in names:
                    bounds = {other: (0, record.length)}
            if split in bounds and record.length >= self._shortest:
                regions.append(Region(number, *bounds[split]))
        if self.bed is None:
            return regions
        parts = {region.record: (region.start, region.stop) for region in regions}
        cut = [region.within(*parts[region.record]) for region in self._bed_regions if region.record in parts]
        return [region for region in cut if region.stop > region.start]

    def _short_ones(self, genome: Genome) -> list[tuple[str, int]]:
        """Return names and lengths of records, or of regions of the BED file (read here), shorter than a window."""
        ones = [(record.name, record.length) for record in genome.records]
        if self.bed is not None:
            self._bed_regions = read_bed(self.bed, genome.records, self.opener)
            ones = [(x.name or f"{ones[x.record][0]}:{x.start}-{x.stop}", x.stop - x.start) for x in self._bed_regions]
        return [(name, length) for name, length in ones if length < self._shortest]

    def _windows(self, genome: Genome, split: str) -> GenomeWindows:
        regions, ragged = self._regions(genome.records, split), self.pack_tokens is not None
        max_n = self.max_n_fraction * self.seq_len if self.n_policy == "skip" else None
        share = self.reverse_complement if split == "train" else 0.0
        return GenomeWindows(genome, regions, self.seq_len, max_n, share, self.seed, self.limit(split), ragged)

    @property
    def _shortest(self) -> int:
        return self.seq_len if self.pack_tokens is None else 2

    def _named(self, short: list[tuple[str, int]]) -> str:
        """Return the number of short records or regions, and the names and lengths of up to 20 of them."""
        names = ", ".join(f"{name} ({length:,})" for name, length in short[:20])
        hidden = f" and {len(short) - 20:,} more" if len(short) > 20 else ""
        several, verb = ("s", "are") if len(short) > 1 else ("", "is")
        item = "record" if self.bed is None else "region"
        return f"{len(short):,} {item}{several} ({names}{hidden}) {verb}"

    def _refuse_short(self, short: list[tuple[str, int]]) -> None:
        window, lower = "two bases", ""
        if self.pack_tokens is None:
            window = f"a window of data.seq_len = {self.seq_len}"
            lower = f"lower data.seq_len to at most {min(length for _, length in short)}, or "
        raise ValueError(
            f'{self._named(short)} shorter than {window}: {lower}set data.short to "skip" to leave such '
            f"{'record' if self.bed is None else 'region'}s out"
        )

    def _check_names(self, records: list[Record]) -> None:
        known = [record.name for record in records]
        for split, names in self.names.items():
            missing = [name for name in names if name not in known]
            if missing:
                shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
                raise ValueError(
                    f"data.{split}_names holds {missing}, but no record has this name (the first word of a header). "
                    f"There are: {shown}"
                )

    def _check_split(self, split: str, windows: GenomeWindows) -> None:
        if len(windows):
            return
        if windows.left_out:
            raise ValueError(
                f"all {windows.left_out} windows of the {split} split hold more than {self.max_n_fraction:.0%} N: raise "
                'data.max_n_fraction, or set data.n_policy to "token"'
            )
        change = (
            f"raise data.{split}_fraction, name records in data.{split}_names, or do without a {split} split: "
            f"data.{split}_fraction 0, and no data.{split}_names"
        )
        if split == "train":
            change = (
                "lower data.val_fraction or data.test_fraction, or name fewer records in data.val_names and "
                "data.test_names; to predict or test on everything set data.test_fraction to 1, and data.val_fraction to 0"
            )
        raise ValueError(
            f"the {split} split has no region of data.seq_len = {self.seq_len} bases: lower data.seq_len, or {change}"
        )

    def _log_summary(self, short: list[tuple[str, int]]) -> None:
        rank_zero_info(f"data: {self.describe()}")
        if short:
            rank_zero_info(f"data: {self._named(short)} shorter than a window and left out (data.short)")
        ambiguous = {record.name: record.others for record in self.genome.records if record.others}
        if ambiguous:
            most = max(ambiguous, key=lambda name: ambiguous[name])
            rank_zero_info(
                f"data: {sum(ambiguous.values()):,} IUPAC letters other than A C G T U N were read as N in {len(ambiguous)} "
                f"records, most in {most} ({ambiguous[most]:,})"
            )


class GenomeWindows(Dataset):
    """Consecutive windows of N bases in regions of records.

    Args:
        genome: the records.
        regions: `Region`s, or tuples (record number, start, stop); labels do not leave a region.
        seq_len: N.
        max_n: leave out windows with more N than this; None keeps all.
        reverse_complement: share of the windows that are read from the other strand, drawn in each epoch.
        seed: determines, with the epoch and the window's number, whether a window is read from the other strand.
        limit: maximum number of windows.
        ragged: make the bases after the last whole window of a region one more window, if there are at least two (a
            base and its label); `max_n` of this window is lowered in proportion.
    """

    def __init__(
        self,
        genome: Genome,
        regions: Sequence[Region | tuple[int, int, int]],
        seq_len: int,
        max_n: float | None = None,
        reverse_complement: float = 0.0,
        seed: int = 0,
        limit: int | None = None,
        ragged: bool = False,
    ) -> None:
        self.ragged = ragged
        self.genome, self.seq_len, self.reverse_complement, self.seed = genome, seq_len, reverse_complement, seed
        self.epoch = 0
        named = [Region(*x) for x in regions]
        self._regions = np.array([x[:3] for x in named], dtype=np.int64).reshape(-1, 3)
        self._strands, self._names = np.array([x.strand for x in named], dtype=np.int64), [x.name for x in named]
        sizes = self._regions[:, 2] - self._regions[:, 1]
        self._ends = np.cumsum(np.maximum(0, -(-(sizes - 1) // seq_len)) if ragged else sizes // seq_len)
        self.windows = int(self._ends[-1]) if regions else 0
        #: number of bases in all windows, including windows with too many N
        self.bases = int(self._all_lengths().sum())
        self._kept = None if max_n is None else self._with_few_n(max_n)
        count = self.windows if self._kept is None else len(self._kept)
        self.left_out = self.windows - count  # number of windows with too many N
        self.count = count if limit is None else min(count, limit)
        if ragged:
            #: number of bases of each window
            lengths = self._all_lengths()
            self.lengths = (lengths if self._kept is None else lengths[self._kept])[: self.count]

    def _all_lengths(self) -> np.ndarray:
        """Return the number of bases of each window, including windows with too many N."""
        lengths = np.full(self.windows, self.seq_len, dtype=np.int64)
        if self.ragged:
            sizes, last = self._regions[:, 2] - self._regions[:, 1], np.diff(self._ends, prepend=0)
            nonempty = last > 0
            remainder = sizes - (last - 1) * self.seq_len
            lengths[self._ends[nonempty] - 1] = np.minimum(self.seq_len, remainder[nonempty])
        return lengths

    def _with_few_n(self, max_n: float) -> np.ndarray:
        """Return the numbers of the windows with at most `max_n` N."""
        enough, before = [np.empty(0, dtype=bool)], 0
        lengths = self._all_lengths()
        for (number, start, stop), strand, end in zip(self._regions, self._strands, self._ends, strict=True):
            sizes = lengths[before:end]
            steps = np.concatenate([[0], np.cumsum(sizes)])
            edges = stop - steps if strand < 0 else start + steps
            unknown = abs(np.diff(self.genome.records[number].unknown_before(edges)))
            enough.append(unknown <= max_n * sizes / self.seq_len)
            before = int(end)
        return np.flatnonzero(np.concatenate(enough))

    def length_of(self, index: int) -> int:
        """Return the number of bases of a window. Raises IndexError if there is no such window."""
        _, first, last, _ = self._place(index)
        return last - first

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """Return a string that changes if the bases or their windows change."""
        known = self._strands.tobytes() if self._strands.any() else b""
        cut = hashlib.blake2b(self._regions.tobytes() + known, digest_size=8).hexdigest()
        strands = f"{self.reverse_complement} reversed by {self.seed}"
        ragged = ", of any length" if self.ragged else ""
        return f"{self.genome.fingerprint()}, {self.count} of {self.windows} windows {cut}{ragged}, {strands}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the reversed windows; `ResumableLoader` calls it before each pass."""
        self.epoch = epoch

    def where(self, index: int) -> tuple[str, str, int]:
        """Return a window's file, its record's name, and its first base, counted from 0. Raises IndexError."""
        number, start, _, _ = self._place(index)
        return self.genome.records[number].file, self.genome.records[number].name, start

    def region_of(self, index: int) -> Region:
        """Return the bases of a window, with the strand (0: either) and the name of its region."""
        number, first, last, region = self._place(index)
        return Region(number, first, last, int(self._strands[region]), self._names[region])

    def reversed(self, index: int) -> bool:
        """Return whether this epoch reads a window from the other strand; every process returns the same."""
        strand = self._strands[self._place(index)[3]]
        if strand:
            return bool(strand < 0)
        if self.reverse_complement == 0:
            return False
        bits = repr((self.seed, self.epoch, index)).encode()
        drawn = int.from_bytes(hashlib.blake2b(bits, digest_size=8).digest(), "big") / 2**64
        return drawn < self.reverse_complement

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return {"tokens": (N,) int64, "labels": (N,) int64 next base of the same strand, "index": window number}."""
        return self.read_ranges(index, (range(self.length_of(index)),))

    def read_ranges(self, index: int, ranges: tuple[range, ...], flip: bool | None = None) -> dict[str, Any]:
        """Return the window at the positions `ranges`; read the bases of each range, and one more for the last label.

        If `flip` is True, read the other strand; if it is None, `reversed` decides.
        """
        flip = self.reversed(index) if flip is None else flip
        tokens, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for x in ranges:
            if x:
                values = torch.from_numpy(self._read(index, x.start, x[-1] + 2, flip))
                tokens.append(values[:-1][:: x.step])
                labels.append(values[1:][:: x.step])
        target = torch.cat(labels)
        target[target == N_CODE] = -100  # an unknown base is no label
        return {"tokens": torch.cat(tokens), "labels": target, "index": index}

    def _place(self, index: int) -> tuple[int, int, int, int]:
        """Return a window's record number, its first base, its last base + 1, and its region number."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} was asked for, but there are {self.count}")
        window = index if self._kept is None else int(self._kept[index])
        region = int(np.searchsorted(self._ends, window, side="right"))
        number, start, stop = map(int, self._regions[region])
        before = (window - (int(self._ends[region - 1]) if region else 0)) * self.seq_len
        if self._strands[region] < 0:
            return number, max(start, stop - before - self.seq_len), stop - before, region
        return number, start + before, min(stop, start + before + self.seq_len), region

    def _read(self, index: int, begin: int, end: int, flip: bool) -> np.ndarray:
        """Return positions [begin, end) of a window, with `end` at most N + 1: int64 codes, -100 beyond the region."""
        number, first, last, region = self._place(index)
        _, low, high = map(int, self._regions[region])
        start, stop = (last - end, last - begin) if flip else (first + begin, first + end)
        codes = self.genome.read(number, max(start, low), min(stop, high))
        if flip:
            codes = np.take(COMPLEMENTS, codes[::-1])
        missing = end - begin - len(codes)  # at most one base: the label of a region's last base
        return np.concatenate([codes.astype(np.int64), np.full(missing, -100, dtype=np.int64)])


class PlacedWindows(Dataset):
    """Windows in order, each with its place in the file: `record`, `start`, `stop`, `strand`, and optionally `region`.

    Args:
        windows: the windows of an evaluation.
        strands: "forward", "reverse", or "both": forward and reverse as two samples.
        named: whether samples have `region`, the name of the region.
    """

    def __init__(self, windows: GenomeWindows, strands: str, named: bool = False) -> None:
        self.windows, self.named, self.seq_len = windows, named, windows.seq_len
        self.flips = {"forward": (False,), "reverse": (True,), "both": (False, True)}[strands]
        #: number of bases of each sample
        self.lengths = np.repeat([windows.length_of(i) for i in range(len(windows))], len(self.flips))

    def __len__(self) -> int:
        return len(self.windows) * len(self.flips)

    def length_of(self, index: int) -> int:
        """Return the number of bases of a sample. Raises IndexError if there is no such sample."""
        return int(self.lengths[index])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read_ranges(index, (range(self.length_of(index)),))

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """See `GenomeWindows.read_ranges`; adds the place, and `index` is the sample's number."""
        number, reading = divmod(index, len(self.flips))
        region = self.windows.region_of(number)
        flip = self.flips[reading] != (region.strand < 0)
        record = self.windows.genome.records[region.record].name
        place = {"record": record, "start": region.start, "stop": region.stop, "strand": "-" if flip else "+"}
        name = {"region": region.name} if self.named else {}
        return {**self.windows.read_ranges(number, ranges, flip), "index": index, **place, **name}
