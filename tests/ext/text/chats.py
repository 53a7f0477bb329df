"""Conversations, tokenizers and templates for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: as in Qwen 3, thoughts remain in the last answer only
FORGETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: no special token and no line break before the answer
GLUED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "long",
    "mat",
    "while",
    "it",
    "rained",
    "and",
    "nobody",
    "came",
    "to",
    "see",
    "whether",
    "it",
    "was",
    "dry",
]


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """Return a row in which messages of the user and the assistant alternate."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": x} for i, x in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def chats(count: int, seed: int = 0, most: int = 12) -> list[dict[str, Any]]:
    """Return rows of random words with one to three turns."""
    rng = random.Random(seed)

    def words() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    return [chat(*(words() for _ in range(2 * rng.randint(1, 3)))) for _ in range(count)]


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bpe(vocab_size: int = 330) -> Any:
    """A byte-level BPE tokenizer of `tokenizers` with ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "user assistant system"] * 4, trainer)
    return tokenizer


def tokenizer_json(folder: Path, vocab_size: int = 330) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    bpe(vocab_size).save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")
