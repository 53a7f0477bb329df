"""Implement `lightning-dilated generate`: continue a prompt with a language model over bytes or tokens."""

from __future__ import annotations

import argparse
import codecs
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml

from lightning_dilated._compat.cpython import option_actions
from lightning_dilated._removed import removed
from lightning_dilated._validation import integer, text_of
from lightning_dilated.cli.errors import check_device
from lightning_dilated.ext.decoding.load import load_language_model, stored_tokenizer
from lightning_dilated.ext.decoding.sampling import check_sampling
from lightning_dilated.ext.text.tokenizer import decoded, encode, load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: default number of bytes or tokens to add
_COUNT = 256


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("lightning-dilated generate", description="Continue a prompt with a language model.")
    p.add_argument("--config", "-c", type=Path, help="a YAML file with these options; the command line overrides it")
    p.add_argument(
        "--ckpt_path",
        help="checkpoint of a LongNetLM or HFCausalLM, or a folder that save_pretrained wrote, here or in transformers",
    )
    p.add_argument(
        "--tokenizer", help="tokenizer.json of a model over tokens (default: the checkpoint's; without one, bytes)"
    )
    p.add_argument("--prompt", help="text to continue; - reads standard input")
    p.add_argument("--max_new_bytes", type=int, help=f"number of bytes to add (default {_COUNT})")
    p.add_argument("--max_new_tokens", type=int, help=f"number of tokens to add with a tokenizer (default {_COUNT})")
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default %(default)s)")
    p.add_argument("--top_k", type=int, help="draw from the k likeliest tokens")
    p.add_argument("--top_p", type=float, help="draw from the likeliest tokens that together have this probability")
    p.add_argument("--stop", help=r"token that ends the text; for bytes, a character of one byte, such as '\n'")
    p.add_argument("--stream", action="store_true", help="print the text as it is drawn")
    p.add_argument("--seed", type=int, default=0, help="seed of the draws (default %(default)s)")
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default %(default)s)")
    return p


def parsed(argv: list[str]) -> argparse.Namespace:
    """Parse the options; the command line takes precedence over the config, and the config over the defaults."""
    p = parser()
    if any(word.partition("=")[0] == "--devices" for word in argv):
        raise ValueError(removed("generate --devices"))
    options = p.parse_args(argv)
    config = options.config
    if config is not None:
        values = yaml.safe_load(text_of(config))
        known = {a.dest: a for a in option_actions(p) if a.dest not in ("help", "config")}
        if not isinstance(values, dict) or not set(values) <= set(known):
            wrong = sorted(set(values) - set(known)) if isinstance(values, dict) else type(values).__name__
            if "devices" in wrong:
                raise ValueError(removed("generate --devices"))
            raise ValueError(f"--config {config} of generate holds {wrong}; its keys are {', '.join(known)}.")
        defaults = {k: _typed(config, known[k], v) for k, v in values.items() if v is not None}
        _one_count(f"--config {config}", defaults.get("max_new_bytes"), defaults.get("max_new_tokens"))
        if options.max_new_bytes is not None or options.max_new_tokens is not None:  # overrides both config entries
            defaults.update(max_new_bytes=None, max_new_tokens=None)
        p.set_defaults(**defaults)
    _one_count("generate", options.max_new_bytes, options.max_new_tokens)
    args = p.parse_args(argv)
    missing = [f"--{name}" for name in ("ckpt_path", "prompt") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"generate needs {' and '.join(missing)}.")
    return args


def _one_count(where: str, count: int | None, tokens: int | None) -> None:
    if count is not None and tokens is not None:
        raise ValueError(
            f"{where} takes one of max_new_bytes and max_new_tokens, but has both ({count} and {tokens}): leave one out."
        )


def _typed(config: Path, action: argparse.Action, value: object) -> object:
    kind = bool if action.nargs == 0 else action.type or str
    if isinstance(value, bool) != (kind is bool):
        raise ValueError(f"--config {config}: {action.dest} must be of type {kind.__name__}, got {value!r}.")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"--config {config}: {action.dest} must be of type {kind.__name__}, got {value!r}.") from None


def unescaped(text: str) -> str:
    r"""Return the text, or the character of an escape such as \n; "" for an invalid escape."""
    try:
        character = codecs.decode(text, "unicode_escape") if text.startswith("\\") else text
        character.encode()  # raises for half a surrogate pair
        return character
    except UnicodeError:
        return ""


def checked_text(option: str, text: str) -> str:
    """Return the text; raise ValueError if it is not UTF-8, which neither the shell nor standard input checks."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a character, U+{code:04X}"
        raise ValueError(
            f"{option} is not UTF-8 text: {what} after {error.start:,} characters. Convert it first, as by iconv -t UTF-8."
        ) from None
    return text


def prompt_of(text: str) -> str:
    """Return the text to continue ("-": standard input); raise ValueError if it is empty or not UTF-8."""
    try:
        prompt = checked_text("--prompt", sys.stdin.read() if text == "-" else text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt - is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start:,} (counted from 0). "
            "Convert it first, as by iconv -t UTF-8."
        ) from None
    if not prompt:
        raise ValueError("--prompt is empty; give at least one character to continue.")
    return prompt


def stop_token(text: str | None, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends the generated text; `text`: the token as text."""
    if text is None:
        return None
    whole = tokenizer.token_to_id(text)
    ids = encode(tokenizer, unescaped(text)) if whole is None else [whole]
    if len(ids) != 1:
        raise ValueError(f"--stop takes one token of the tokenizer, such as its end of text; {text!r} is {len(ids)}.")
    return ids[0]


def stop_byte(text: str | None) -> int | None:
    """Return the byte that ends the generated text; `text`: a character or its escape."""
    if text is None:
        return None
    character = unescaped(text)
    if len(character.encode()) != 1:
        raise ValueError(rf"--stop takes one character of one byte, such as . or '\n'; got {text!r}.")
    return ord(character)


def print_bytes(parts: Iterable[bytes]) -> None:
    """Print UTF-8 text as its bytes arrive; print the replacement character for invalid bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in parts:
        print(decoder.decode(part), end="", flush=True)
    print(decoder.decode(b"", final=True))


def count_of(args: argparse.Namespace, stored: bool = False) -> int:
    """Return how many bytes or tokens to draw; `stored`: whether the checkpoint contains a tokenizer."""
    if args.max_new_tokens is not None and args.tokenizer is None and not stored:
        raise ValueError("--max_new_tokens goes with --tokenizer; a model over bytes takes --max_new_bytes.")
    name = "max_new_bytes" if args.max_new_tokens is None else "max_new_tokens"
    count = getattr(args, name)
    return _COUNT if count is None else integer(count, f"--{name}", 0)


@dataclass(frozen=True)
class Request:
    """Checked options: the prompt's tokens, the number to add, the token that ends the text, and the tokenizer."""

    args: argparse.Namespace
    ids: list[int]
    count: int
    stop: int | None
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, args: argparse.Namespace, prompt: str) -> Request:
        """Check the options, and encode the prompt."""
        if args.stop is not None:
            checked_text("--stop", args.stop)
        check_sampling(args.temperature, args.top_k, args.top_p)
        if not 0 <= args.seed < 2**63:
            raise ValueError(f"--seed must lie in 0..2^63 - 1, got {args.seed}.")
        tokenizer = stored_tokenizer(args.ckpt_path) if args.tokenizer is None else load_tokenizer(args.tokenizer)
        count = count_of(args, tokenizer is not None)
        stop = stop_byte(args.stop) if tokenizer is None else stop_token(args.stop, tokenizer)
        ids = list(prompt.encode()) if tokenizer is None else encode(tokenizer, prompt)
        if not ids:
            raise ValueError(f"--prompt {prompt!r} holds no token of the tokenizer; give at least one to continue.")
        return cls(args, ids, count, stop, tokenizer)

    def continued(self, device: str) -> Iterator[bytes]:
        """Yield the bytes that continue the prompt, as they are drawn."""
        args, size = self.args, None if self.tokenizer is None else vocabulary_size(self.tokenizer)
        model = load_language_model(args.ckpt_path, size).to(device)
        generator = torch.Generator(device).manual_seed(args.seed)
        options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        tokens = torch.tensor([self.ids], device=device)
        steps = model.generate_stream(tokens, self.count, **options, generator=generator, stop=self.stop)
        drawn = (int(step) for step in steps)
        if self.tokenizer is None:
            yield from (bytes([x]) for x in drawn)
        else:
            yield from (text.encode() for text in decoded(self.tokenizer, self.ids, drawn))


def run(argv: list[str]) -> None:
    """Run the command: print the prompt and its continuation."""
    args = parsed(argv)
    prompt = prompt_of(args.prompt)
    request = Request.of(args, prompt)
    check_device(args.device)
    parts = itertools.chain([prompt.encode()], request.continued(args.device))
    print_bytes(parts if args.stream else [b"".join(parts)])
