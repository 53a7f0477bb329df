"""LongContextDataModule: reading answers every sample, answers are at their cell's depth, guessing does not help."""

import math
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_dilated.data import LongContextDataModule
from lightning_dilated.ext.evaluation.questions import TASKS

FORMS = ("text", "tokens")
SIZES = {
    "text": {"lengths": [1001, 1700]},
    "tokens": {"lengths": [83, 150], "vocabulary": 7, "key_tokens": 2, "value_tokens": 2, "fillers": 5},
}


def data(task="needle", form="tokens", **options):
    return LongContextDataModule(
        task, form=form, **{**SIZES.get(form, {}), "samples_per_cell": 4, "train_size": 30, **options}
    )


def text_of(sample):
    return bytes(sample["tokens"].tolist()).decode()


def read_text(sample):
    """Read a text. Return (its answer, all values in it, character position of the statement that is asked for)."""
    *lines, question = text_of(sample).split("\n")
    values, first, place = {}, {}, 0
    for line in lines:
        if (
            match := re.fullmatch(r"(?:The code|A code|Variable) (?:of )?([a-z]+-[a-z]+) is (\d+)\.", line)
        ) is not None:
            values.setdefault(match[1], []).append(match[2])
            first.setdefault(match[1], place)
        elif (match := re.fullmatch(r"Variable ([a-z]+-[a-z]+) is equal to ([a-z]+-[a-z]+)\.", line)) is not None:
            values[match[1]], first[match[1]] = values[match[2]], first[match[2]]  # KeyError if unknown
        place += len(line) + 1
    asked_key = re.findall(r"[a-z]+-[a-z]+", question)[-1]
    return " " + ", ".join(values[asked_key]), sorted({x for group in values.values() for x in group}), first[asked_key]


def read_tokens(sample, module):
    """Read a sample of tokens by the documented format. Return the same as `read_text`, with tuples as values."""
    form, tokens = module.form, sample["tokens"].tolist()
    keys, values = range(2 + form.fillers, 2 + form.fillers + 7), range(2 + form.fillers + 7, module.vocab_size)
    question = tokens.index(1)
    values_of, first, at = {}, {}, 0
    while at < question:
        if tokens[at] in keys:
            key, other = tuple(tokens[at : at + 2]), tuple(tokens[at + 2 : at + 4])
            if other[0] in values:
                values_of.setdefault(key, []).append(other)
                first.setdefault(key, at)
            else:
                values_of[key], first[key] = values_of[other], first[other]
            at += 4
        else:
            assert 2 <= tokens[at] < 2 + form.fillers
            at += 1
    asked_key = tuple(tokens[question + 1 : question + 3])
    everything = sorted({x for group in values_of.values() for x in group})
    return [x for value in values_of[asked_key] for x in value], everything, first[asked_key]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("form", FORMS)
def test_a_reader_answers_every_sample(task, form):
    module = data(task, form)
    for split in ("train", "val", "test"):
        for sample in module.dataset(split):
            length = module.cell(split, sample["index"]).length
            assert len(sample["tokens"]) == len(sample["labels"]) == sample["lengths"] == length in module.lengths
            assert int(sample["tokens"].min()) >= 0 and int(sample["tokens"].max()) < module.vocab_size
            answer, values, _ = read_text(sample) if form == "text" else read_tokens(sample, module)
            counted = sample["labels"] != -100
            labels = sample["labels"][counted].tolist()
            assert (bytes(labels).decode() if form == "text" else labels) == answer
            assert counted.nonzero().flatten().tolist() == list(range(length - len(labels) - 1, length - 1))
            assert sample["tokens"][-len(labels) :].tolist() == labels
            assert len(values) == (1 + module.task.distractors) * module.task.num_values  # all values differ


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_depth_is_where_the_needle_stands(task, form):
    """All statements are known, so the filler before the statement that is asked for can be counted."""
    module = data(task, form, depths=[0, 30, 50, 100])
    for sample in module.dataset("val"):
        length, depth = module.cell("val", sample["index"])
        rng = module.dataset("val").generator(sample["index"])
        parts = module._parts(rng)
        room = length - parts.size
        place = (read_text(sample) if form == "text" else read_tokens(sample, module))[2]
        # number of characters or tokens in the statements before the needle
        if form == "text":
            before = sum(
                len(x) + 1 for x in text_of(sample)[:place].split("\n") if "code" in x or "Var" in x or "var" in x
            )
        else:
            keys = range(2 + module.form.fillers, module.vocab_size)
            before = sum(x in keys for x in sample["tokens"][:place].tolist())
        slack = 30 if form == "text" else 0.5  # half a line of text, or half a token
        assert abs(place - before - depth / 100 * room) <= slack


def test_cells_are_a_grid_in_order():
    module = data(lengths=[100, 50], depths=[0, 12.5, 100], samples_per_cell=2)
    cells = [tuple(module.cell("val", i)) for i in range(12)]
    assert cells == [(n, d) for n in (100, 50) for d in (0, 12.5, 100) for _ in range(2)]
    assert module.sizes == {"train": 30, "val": 12, "test": 12} and module.seq_len == 100
    trained = [module.cell("train", i) for i in range(30)]
    assert {x.length for x in trained} == {50, 100} and len({x.depth for x in trained}) == 30


@pytest.mark.parametrize("form", FORMS)
def test_samples_depend_on_seed_split_and_index_alone(form):
    module, again, other = data(form=form), data(form=form), data(form=form, seed=1)
    for split in ("val", "train", "test"):
        for index in (7, 0):
            sample = module.dataset(split)[index]
            assert torch.equal(sample["tokens"], again.dataset(split)[index]["tokens"])
            assert not torch.equal(sample["tokens"], other.dataset(split)[index]["tokens"])
    assert not torch.equal(module.dataset("val")[0]["tokens"], module.dataset("test")[0]["tokens"])
    assert not torch.equal(module.dataset("val")[0]["tokens"], module.dataset("val")[1]["tokens"])
    assert module.dataset("val").fingerprint() != other.dataset("val").fingerprint()


def test_a_rank_reads_its_positions_and_padding():
    module = data(lengths=[60, 100])
    samples = module.dataset("val")
    whole = samples[0]
    assert samples.length_of(0) == 60
    parts = [samples.read_ranges(0, (range(a, b),)) for a, b in pairwise([0, 34, 67, 100])]
    for name, fill in (("tokens", 0), ("labels", -100)):
        joined = torch.cat([x[name] for x in parts])
        assert torch.equal(joined[:60], whole[name]) and (joined[60:] == fill).all()
    assert [x["lengths"] for x in parts] == [60] * 3
    mixed = samples.read_ranges(0, (range(3, 9, 2), range(70, 72)))
    assert mixed["tokens"].tolist() == [*whole["tokens"][3:9:2].tolist(), 0, 0]


def test_batches_are_padded_where_lengths_differ():
    module = data(lengths=[60, 100], depths=50, samples_per_cell=3, batch_size=2)
    batches = list(module.val_dataloader())
    assert [tuple(x["tokens"].shape) for x in batches] == [(2, 60), (2, 100), (2, 100)]
    assert ["lengths" in x for x in batches] == [False, True, False]
    assert batches[1]["lengths"].tolist() == [60, 100]
    assert (batches[1]["tokens"][0, 60:] == 0).all() and (batches[1]["labels"][0, 60:] == -100).all()


@pytest.mark.parametrize("task", TASKS)
def test_what_guessing_gives(task):
    """Guess without the text, among values of the text, and by the frequency or position of values."""
    options = {"vocabulary": 10, "key_tokens": 2, "value_tokens": 1, "distractors": 3, "num_values": 2, "lengths": 90}
    module = data(task, **options, depths=list(range(0, 101, 10)), samples_per_cell=150)
    rng, count = np.random.default_rng(1), Counter()
    size = module.task.num_values
    first_value, samples = 2 + module.form.fillers + 10, module.sizes["val"]
    for sample in module.dataset("val"):
        tokens = sample["tokens"].tolist()
        right = tokens[-size:]
        stated = [x for x in tokens[:-size] if x >= first_value]
        assert max(Counter(stated).values()) == 1, "no value is more frequent than another"
        count["blind"] += (first_value + rng.choice(10, size, replace=False)).tolist() == right
        chosen = np.sort(rng.choice(len(stated), size, replace=False))
        count["unbound"] += [stated[i] for i in chosen] == right
        count["first"] += stated[:size] == right
        count["last"] += stated[-size:] == right
    assert module.guess["unbound"] == 1 / math.comb(4 * size, size)
    for name, chance in module.guess.items():
        assert abs(count[name] / samples - chance) < 4 * math.sqrt(chance / samples), name
    if size == 1:  # on average over all depths, the position of a value is no hint
        for name in ("first", "last"):
            assert abs(count[name] / samples - module.guess["unbound"]) < 0.07, name


def test_a_tokenizer(tmp_path):
    """With a byte-level BPE that starts texts with a special token, text and answer are the same as with bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.processors import TemplateProcessing

    from lightning_dilated.ext.evaluation.vocabulary import filler_lines

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([*filler_lines(), "12 345 67 890"], 400, special_tokens=["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begun = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begun.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begun.save(str(tmp_path / "tokenizer.json"))
    module = data("multi_value", "text", tokenizer=str(tmp_path), lengths=[900])  # the folder of the tokenizer
    assert module.vocab_size == plain.get_vocab_size() == 400
    for sample in module.dataset("val"):
        assert len(sample["tokens"]) == 900 and sample["tokens"][0] == 0 and (sample["tokens"][1:] > 0).all()
        text = plain.decode(sample["tokens"].tolist())
        answer, _, _ = read_text({"tokens": torch.tensor(list(text.encode()))})
        labels = sample["labels"][sample["labels"] != -100].tolist()
        assert plain.decode(labels) == answer and text.endswith(answer)


WRONG = [
    (
        {"task": "sorting"},
        ValueError,
        "data.task must be one of needle, multi_key, multi_value, tracing; got 'sorting'",
    ),
    ({"lengths": []}, ValueError, r"data.lengths must be one or several different numbers, got \[\]"),
    ({"lengths": [64, 64]}, ValueError, r"data.lengths must be one or several different numbers, got \[64, 64\]"),
    ({"lengths": [64.5]}, TypeError, "data.lengths must be an integer, got 64.5"),
    ({"depths": [0, 101]}, ValueError, r"data.depths must be a number in \[0, 100\], got 101"),
    ({"samples_per_cell": 0}, ValueError, "data.samples_per_cell must be at least 1, got 0"),
    ({"form": "bytes"}, ValueError, "data.form must be one of text, tokens; got 'bytes'"),
    (
        {"tokenizer": "x.json"},
        ValueError,
        'data.tokenizer is x.json, but data.form "tokens" has a vocabulary of its own',
    ),
    (
        {"lengths": [100, 18]},
        ValueError,
        "data.lengths has 18, but a sample of needle with data.distractors = 3 takes 21",
    ),
    (
        {"distractors": 49},
        ValueError,
        "50 different keys, but there are 49: raise data.key_tokens or data.vocabulary, or lower",
    ),
    (
        {"distractors": 9, "value_tokens": 1},
        ValueError,
        "10 different values, but there are 7: raise data.value_tokens",
    ),
    ({"distractors": -1}, ValueError, "data.distractors must be at least 0, got -1"),
    ({"task": "tracing", "hops": 0}, ValueError, "data.hops must be at least 1, got 0"),
    ({"form": "text", "value_digits": 0}, ValueError, "data.value_digits must be at least 1, got 0"),
    ({"form": "text", "lengths": 200}, ValueError, "data.lengths has 200, but a sample of needle"),
    ({"form": "text", "tokenizer": "none.json"}, FileNotFoundError, "tokenizer none.json: no such file"),
    ({"train_size": 1, "batch_size": 2}, ValueError, "lower data.batch_size"),
]


@pytest.mark.parametrize("options, kind, message", WRONG)
def test_wrong_values_say_what_to_change(options, kind, message):
    with pytest.raises(kind, match=message):
        data(**options).setup()


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is a folder without tokenizer.json.*save_pretrained"):
        data(form="text", tokenizer=str(tmp_path))


def test_samples_that_are_not_there():
    module = data()
    with pytest.raises(IndexError, match="sample 40 was asked for, but the val split has 40"):
        module.dataset("val")[40]
    with pytest.raises(ValueError, match="split must be one of"):
        module.cell("all", 0)
