"""LongContextDataModule: questions about values that are stated within filler, by length and depth.

Shape letters: B batch, N tokens of a sample.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.ext.evaluation.questions import DISTRACTORS, TASKS, Task, places
from lightning_dilated.ext.evaluation.recall_tasks import RuleDataModule, RuleSamples, sample_generator
from lightning_dilated.ext.evaluation.renderers import Form, Parts, TextForm, TokenForm

FORMS = ("text", "tokens")
#: {entry of a sample with one value per token: its padding value}
_PADDING = {"tokens": 0, "labels": -100}


class Cell(NamedTuple):
    """A length in tokens and a depth in percent."""

    length: int
    depth: float


class LongContextSamples(RuleSamples):
    """Samples of different lengths, see `LongContextDataModule`."""

    def __init__(self, task: LongContextDataModule, split: str) -> None:
        super().__init__(task, split)
        self.cell_of = task.cell

    def length_of(self, index: int) -> int:
        """Return the number of tokens of sample `index`. Raises IndexError if there is no such sample."""
        return self.cell_of(self.split, index).length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the whole sample `index`. Raises IndexError if there is no such sample."""
        return {**self.make(self.generator(index), self.split, self.cell_of(self.split, index)), "index": index}

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the sample at the positions `ranges`; positions after its end are padding."""
        sample = self[index]
        positions = torch.tensor([position for x in ranges for position in x], dtype=torch.int64)
        inside, length = positions < sample["lengths"], sample["lengths"]
        for name, fill in _PADDING.items():
            sample[name] = torch.where(inside, sample[name][positions.clamp(max=length - 1)], fill)
        return sample


def _task(name: str, distractors: int | None, num_values: int, hops: int) -> Task:
    """Make a task; options of other tasks are ignored."""
    one_of(name, "data.task", TASKS)
    return Task(
        name,
        DISTRACTORS[name] if distractors is None else integer(distractors, "data.distractors", 0),
        integer(num_values, "data.num_values", 1) if name == "multi_value" else 1,
        integer(hops, "data.hops", 1) if name == "tracing" else 0,
    )


def _refuse_tokenizer(tokenizer: str | None) -> None:
    if tokenizer is not None:
        raise ValueError(
            f'data.tokenizer is {tokenizer}, but data.form "tokens" has a vocabulary of its own: leave one of them out'
        )


class LongContextDataModule(RuleDataModule):
    """Questions about a long context: statements within filler give values to keys, and the end asks for a key's value.

    Batches are {"tokens": (B, N), "labels": (B, N), "index": (B,)}, all int64, and "lengths" (B,) if samples of a batch
    differ in length; tokens are padded with 0. Each token of the answer is the label of the position before it; all
    other labels are -100. The answer's tokens follow the question (teacher forcing), so an answer is right if every
    label is the likeliest token.

    Tasks, of the kinds of RULER (arXiv 2404.06654):

    - needle: the question asks for the value of a key. Distractors are other keys with other values.
    - multi_key: the same as needle, with more distractors.
    - multi_value: each key has `num_values` values at different places; the question asks for all of them, in order.
    - tracing: a variable has a value, a second variable has the value of the first, and so on; the question asks for
      the value of the last one. Distractors are other chains of variables.

    Forms: "text" is English in bytes or the tokens of a tokenizer; "tokens" has its own small vocabulary, for models
    that are trained on the task.

    Validation and test have `samples_per_cell` samples of each length and depth, in the order of `lengths` and then of
    `depths`. Depth is the percentage of the filler that precedes the first statement of the answer (in text, the
    nearest end of a line). Further statements of the answer are anywhere after the first one. Distractors are placed
    in the same way, at uniformly drawn depths. Training samples draw a length, and a depth from 0 to 100.

    Keys and values of a sample all differ and are drawn uniformly, so each value occurs once. `guess` is the share of
    right answers if a model draws from all values ("blind"), or from the values in the text ("unbound"). At depths 0
    and 100 the right value is mostly the first or last one, so a model can find it by its place alone. Averaged over
    evenly spaced depths, choosing by place is as good as "unbound".

    `callbacks.AccuracyByDepth` reports the share of right answers.

    Args:
        task: "needle", "multi_key", "multi_value" or "tracing".
        lengths: N of the samples, including question and answer.
        depths: percentages from 0 to 100.
        samples_per_cell: number of samples of each length and depth, in validation and in test.
        form: "text" or "tokens".
        tokenizer: for text, a tokenizer.json or a folder with one, as transformers saves it; null for bytes. A sample
            begins with the special tokens that the tokenizer adds before a text.
        distractors: number of distractors; null is 3, and 15 for multi_key.
        num_values: for multi_value, number of values of a key.
        hops: for tracing, number of statements from the value's variable to the variable that is asked for.
        value_digits: for text, number of digits of a value.
        vocabulary: for tokens, number of symbols for keys, and of symbols for values.
        fillers: for tokens, number of different filler tokens.
        key_tokens, value_tokens: for tokens, number of symbols of a key and of a value.
        batch_size, train_size, seed, num_workers, pin_memory: see `RuleDataModule`.

    Raises: TypeError, ValueError or FileNotFoundError for values outside these ranges, lengths without room for the
        statements, or too few keys or values.
    """

    along = ("tokens", "labels")

    def __init__(
        self,
        task: Literal["needle", "multi_key", "multi_value", "tracing"] = "needle",
        lengths: list[int] | int = 1024,
        depths: list[float] | float = (0, 25, 50, 75, 100),  # type: ignore[assignment]  # a tuple cannot be changed
        samples_per_cell: int = 20,
        form: Literal["text", "tokens"] = "text",
        tokenizer: str | None = None,
        distractors: int | None = None,
        num_values: int = 3,
        hops: int = 3,
        value_digits: int = 5,
        vocabulary: int = 32,
        fillers: int = 16,
        key_tokens: int = 1,
        value_tokens: int = 1,
        batch_size: int = 1,
        train_size: int = 100_000,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
    ) -> None:
        self.lengths = [integer(x, "data.lengths", 1) for x in _as_list(lengths, "data.lengths")]
        self.depths = [real(x, "data.depths", least=0, most=100) for x in _as_list(depths, "data.depths")]
        per_cell = integer(samples_per_cell, "data.samples_per_cell", 1)
        count = per_cell * len(self.lengths) * len(self.depths)
        super().__init__(max(self.lengths), batch_size, train_size, count, count, seed, num_workers, pin_memory)
        self.samples_per_cell = per_cell
        self.task = _task(task, distractors, num_values, hops)
        one_of(form, "data.form", FORMS)
        self.form: Form
        if form == "tokens":
            _refuse_tokenizer(tokenizer)
            self.form = TokenForm(vocabulary, fillers, key_tokens, value_tokens)
            remedies = ("raise data.key_tokens or data.vocabulary", "raise data.value_tokens or data.vocabulary")
        else:
            self.form = TextForm(task, value_digits, tokenizer)
            remedies = ("lower data.distractors or data.hops", "raise data.value_digits")
        self._check_numbers(*remedies)
        self.vocab_size = self.form.vocab_size
        self._check_room(1)

    def _check_numbers(self, key_remedy: str, value_remedy: str) -> None:
        for kind, needed, available, change in (
            ("keys", self.task.keys, self.form.keys, key_remedy),
            ("values", self.task.values, self.form.values, value_remedy),
        ):
            if needed > available:
                raise ValueError(
                    f"a sample of {self.task.name} with data.distractors = {self.task.distractors} has {needed} different "
                    f"{kind}, but there are {available:,}: {change}, or lower data.distractors"
                )

    def _check_room(self, count: int) -> None:
        """Raise ValueError if one of the first samples of validation or test does not fit into its length."""
        for split in ("val", "test"):
            for index in range(count):
                size, cell = self._parts(sample_generator(self.seed, split, index)).size, self.cell(split, index)
                if size > cell.length:
                    raise _no_room(self.task, cell.length, size)

    @property
    def guess(self) -> dict[str, float]:
        """Shares of right answers from guessing, under the keys "blind" and "unbound"; see the class."""
        return self.task.guesses(self.form.values)

    def rule(self) -> str:
        """Return a description of the samples, to compare the data with a checkpoint's."""
        task = self.task
        sizes = f"{task.distractors} distractors, {task.num_values} values, {task.hops} hops"
        return f"{task.name} ({sizes}) over {self.lengths} tokens at {self.depths} %, {self.form.rule()}"

    def check(self) -> None:
        """Check that every sample of validation and test fits. Raises ValueError."""
        super().check()
        self._check_room(self.sizes["val"])

    def dataset(self, split: str) -> LongContextSamples:
        one_of(split, "split", tuple(self.sizes))
        return LongContextSamples(self, split)

    def cell(self, split: str, index: int) -> Cell:
        """Return the length and depth of a sample.

        Raises:
            ValueError: for a split other than "train", "val" and "test".
            IndexError: if there is no such sample.
        """
        one_of(split, "split", tuple(self.sizes))
        if not 0 <= index < self.sizes[split]:
            raise IndexError(f"sample {index} was asked for, but the {split} split has {self.sizes[split]}")
        if split != "train":
            place, depth = divmod(index // self.samples_per_cell, len(self.depths))
            return Cell(self.lengths[place], self.depths[depth])
        rng = np.random.default_rng([self.seed, 3, index])  # 3: differs from the generator of the sample's content
        return Cell(self.lengths[int(rng.integers(len(self.lengths)))], float(rng.uniform(0, 100)))

    def _parts(self, rng: np.random.Generator) -> Parts:
        return self.form.parts(self.task.draw(rng, self.form.keys, self.form.values))

    def make(self, rng: np.random.Generator, split: str, cell: Cell | None = None) -> dict[str, Any]:
        """Make a sample {"tokens": (N,), "labels": (N,) int64, "lengths": N}; `cell` is None for the first cell."""
        length, depth = cell or Cell(self.lengths[0], self.depths[0])
        problem = self.task.draw(rng, self.form.keys, self.form.values)
        parts = self.form.parts(problem)
        room = length - parts.size
        if room < 0:
            raise _no_room(self.task, length, parts.size)
        filler, cuts = self.form.filler(rng, room)
        before = places(rng, problem, depth, room)
        if cuts is not None:
            before = _nearest(cuts, before)
        body, last = [np.array(parts.beginning, np.int64)], 0
        for i in np.argsort(before, kind="stable").tolist():
            body += [filler[last : before[i]], np.array(parts.statements[i], np.int64)]
            last = before[i]
        tokens = np.concatenate([*body, filler[last:], np.array(parts.question + parts.answer, np.int64)])
        labels = np.full(length, -100, np.int64)
        labels[-len(parts.answer) - 1 : -1] = parts.answer
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels), "lengths": length}

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch, padded to the longest sample, with "lengths" unless all samples have the same length."""
        longest = max(len(sample["tokens"]) for sample in samples)
        for name, fill in _PADDING.items():
            for sample in samples:
                missing = longest - len(sample[name])
                sample[name] = torch.nn.functional.pad(sample[name], (0, missing), value=fill)
        batch = default_collate(samples)
        if len(set(batch["lengths"].tolist())) == 1:
            del batch["lengths"]
        return batch


def _as_list(values: Any, name: str) -> list[Any]:
    """Return a value, or a list of different values, as a list. Raises ValueError for repeated values."""
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be one or several different numbers, got {values}.")
    return values


def _nearest(cuts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return for each place the nearest of the increasing `cuts`."""
    right = np.searchsorted(cuts, places).clip(max=len(cuts) - 1)
    left = (right - 1).clip(min=0)
    return np.where(places - cuts[left] <= cuts[right] - places, cuts[left], cuts[right])


def _no_room(task: Task, length: int, needed: int) -> ValueError:
    return ValueError(
        f"data.lengths has {length}, but a sample of {task.name} with data.distractors = {task.distractors} takes "
        f"{needed} tokens without any filler: raise the length, or lower data.distractors"
    )
