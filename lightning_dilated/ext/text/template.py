"""ChatTokenizer: conversations to tokens by a chat template, with a mark on the assistant's tokens.

If the template has {% generation %} tags, they mark the assistant's text. Otherwise the text of the assistant's message
i is the difference between two renderings: one ends before the message (with the header that starts an answer), the
other ends after it. Both renderings must be prefixes of the whole conversation, as text and as tokens; a check raises
ValueError if they are not.
"""

from __future__ import annotations

import functools
import json
import re
import time
from abc import abstractmethod
from collections.abc import Sequence, Sized
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dilated.ext._compat.transformers import templates_compiled_in
from lightning_dilated.ext.text.load_tokenizer import JsonText, TextTokenizer, TransformersText, is_json
from lightning_dilated.ext.text.messages import ANSWERS, Conversation, is_learned, part_texts
from lightning_dilated.ext.text.tokenizer import panics_named

#: the same regular expression as in transformers
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: placed around the text inside a template's tags; no text should contain these characters
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
#: placed around the number of a content part, to detect whether a template writes the part; `repr` escapes U+E0F2
_PART = "\ue0f2"
#: transformers' names for special tokens; a tokenizer.json does not have them
_NAMED = {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"}
TEMPLATE_FILE = "chat_template.jinja"
_WHAT = "data.template is a Jinja chat template: its text, or a file that holds it"


class ChatTokenizer(TextTokenizer):
    """A tokenizer and a chat template."""

    template: str

    @abstractmethod
    def render(self, conversation: Conversation, count: int | None = None, asks: bool = False) -> str:
        """Return the text of the first `count` messages, or of all if None; `asks` appends the header of an answer."""

    @abstractmethod
    def tagged(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return tokens, and for each token 1 if it is inside the template's {% generation %} tags, else 0."""

    def tokens(self, conversation: Conversation, learn: str = "assistant") -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (N,) int64, and a mask (N,) bool of the tokens to train on.

        Args:
            learn: "assistant" for tokens that the assistant writes, "all" for every token; both skip messages that
                opt out, see `is_learned`.

        Raises: ValueError with the conversation's location, if the template refuses the conversation, if no token is to
            be learned, or if the assistant's tokens cannot be determined.
        """
        chat = self._with_contents(conversation)
        if learn == "all":
            ids = self.encode(self.render(chat))
            mask = [1] * len(ids)
        elif not any(x["role"] == ANSWERS for x in chat.messages):
            raise ValueError(
                f"{chat.where} has no message of the role {ANSWERS!r}, so there is nothing to learn: leave the row "
                "out, or train on all tokens (data.train_on: all)"
            )
        elif _TAGS.search(self.template):
            ids, mask = self.tagged(chat)
        else:
            ids, mask = _by_prefixes(self, chat)
        trained = [i for i, x in enumerate(chat.messages) if learn == "all" or x["role"] == ANSWERS]
        silent = [i for i in trained if not is_learned(chat.messages[i])]
        for begin, _, end in _spans(self, chat, ids, silent):
            mask[begin:end] = [0] * (end - begin)
        if not any(mask[1:]):
            raise ValueError(
                f"{chat.where}: the chat template leaves no token to learn: check its {{% generation %}} tags, and that "
                "messages have contents and are not all of weight 0"
            )
        return np.array(ids, dtype=np.int64), np.array(mask, dtype=bool)

    def _with_contents(self, chat: Conversation) -> Conversation:
        """Replace each list of content parts with a text, unless the template writes it part by part."""
        parts = {i: texts for i, x in enumerate(chat.messages) if (texts := part_texts(x)) is not None}
        if not parts:
            return chat
        marks = {i: [f"{_PART}{i}.{j}{_PART}" for j in range(len(texts))] for i, texts in parts.items()}
        probe = list(chat.messages)
        for i, texts in marks.items():
            probe[i] = {**probe[i], "content": [{"type": "text", "text": x} for x in texts]}
        try:
            written = self.render(replace(chat, messages=probe))
        except ValueError:  # a template that concatenates text and content accepts no list
            written = ""
        messages = list(chat.messages)
        for i, texts in parts.items():
            if not all(x in written for x in marks[i]):
                messages[i] = {**messages[i], "content": "".join(texts)}
        return replace(chat, messages=messages)


def load_chat_tokenizer(source: str, template: str | None = None) -> ChatTokenizer:
    """Load a tokenizer.json, which needs a template, or a tokenizer that transformers loads by folder or repository.

    Args:
        template: a Jinja chat template, or the path of a file that holds one, in place of the tokenizer's own.

    Raises: ModuleNotFoundError without the library; OSError or ValueError with the remedy.
    """
    text = None if template is None else template_text(template)
    if is_json(source):
        if text is None:
            raise ValueError(
                f"data.tokenizer {source} is a tokenizer.json, which holds no chat template: set data.template, or "
                f"data.tokenizer to a folder of transformers that has one. {_WHAT}"
            )
        return JsonTokenizer(source, text)
    return TransformersTokenizer(source, text)


def template_text(template: str) -> str:
    """Return a template, read from a file if given a path. Raises FileNotFoundError, or ValueError if it is empty."""
    text = template
    if "{" not in template:
        if not Path(template).is_file():
            raise FileNotFoundError(f"data.template {template}: no such file. {_WHAT}")
        text = Path(template).read_text()
    if not text.strip():
        raise ValueError(f"data.template is empty. {_WHAT}")
    return text


# -- the assistant's tokens --------------------------------------------------------------------------------------------
def _by_prefixes(tokenizer: ChatTokenizer, chat: Conversation) -> tuple[list[int], list[int]]:
    """Return tokens, and for each 1 if the assistant wrote it, else 0, by comparing prefixes of the conversation."""
    ids = tokenizer.encode(tokenizer.render(chat))
    mask = [0] * len(ids)
    answers = [i for i, x in enumerate(chat.messages) if x["role"] == ANSWERS and is_learned(x)]
    for begin, end, _ in _spans(tokenizer, chat, ids, answers):
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def _spans(
    tokenizer: ChatTokenizer, chat: Conversation, ids: list[int], numbers: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return (begin, trimmed end, end) of the tokens of each message in `numbers`; an answer begins after its header.
    The trimmed end leaves out white space that follows a special token. Raises ValueError if the beginning of the
    conversation, rendered alone, is no prefix of the whole text, or if a token crosses the boundary of a message."""
    if not numbers:
        return []
    text = tokenizer.render(chat)
    cuts = []
    for i in numbers:
        for count, asks in ((i, chat.messages[i]["role"] == ANSWERS), (i + 1, False)):
            start = tokenizer.render(chat, count, asks) if count or asks else ""
            if not text.startswith(start):
                raise _unstable(chat, i, _difference(start, text))
            cuts.append(len(start))
    spans, places = [], cut_tokens(tokenizer, text, ids, cuts)
    for n, i in enumerate(numbers):
        begin, end = places[2 * n : 2 * n + 2]
        if begin is None or end is None:
            cut = cuts[2 * n] if begin is None else cuts[2 * n + 1]
            raise _unstable(chat, i, f"a token crosses {text[cut - 20 : cut]!r} | {text[cut : cut + 20]!r}")
        last = end
        while last > begin and not tokenizer.decode([ids[last - 1]]).strip():
            last -= 1
        ended = last > begin and ids[last - 1] in tokenizer.special
        spans.append((begin, last if ended else end, end))
    return spans


def cut_tokens(tokenizer: ChatTokenizer, text: str, ids: list[int], cuts: Sequence[int]) -> list[int | None]:
    """Return for each cut the k such that ids[:k] are the tokens of text[:cut], or None if there is no such k.

    Only the text after the last cut that precedes a special token is encoded again. Tokenizers first split a text at
    special tokens, so tokens after a special token do not depend on the text before it.
    """
    places: list[int | None] = []
    at, done = 0, 0  # text[:at] has the tokens ids[:done]
    for cut in cuts:
        known = None
        for start, first in dict.fromkeys([(at, done), (0, 0)]):
            head = tokenizer.encode(text[start:cut])
            if ids[first : first + len(head)] == head:
                known = first + len(head)
                break
        places.append(known)
        if known is not None and known < len(ids) and ids[known] in tokenizer.special:
            at, done = cut, known
    return places


def _difference(start: str, text: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(start, text, strict=False)) if a != b), min(len(start), len(text)))
    return (
        f"{start[at : at + 40]!r} alone, and {text[at : at + 40]!r} with the messages after it, after {at:,} characters"
    )


def _unstable(chat: Conversation, message: int, what: str) -> ValueError:
    remedy = (
        "Put the assistant's part of the template between {% generation %} and {% endgeneration %} (data.template: that "
        "template), or train on all tokens (data.train_on: all)"
    )
    if not is_learned(chat.messages[message]):
        remedy = "Remove the row, or the weight (or train) of this message, which excludes it from training"
    return ValueError(
        f"{chat.where}: the tokens of message {message} cannot be determined, because the chat template writes the "
        f"beginning of a conversation alone differently than as part of the whole: {what}. {remedy}"
    )


# -- tokenizer.json ----------------------------------------------------------------------------------------------------
class JsonTokenizer(JsonText, ChatTokenizer):
    """A tokenizer.json and a template, without transformers."""

    def __init__(self, path: str, template: str) -> None:
        super().__init__(path)
        self.template = template
        self._compiled = _compiled(template)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}

    def _written(self, chat: Conversation, count: int | None, asks: bool) -> str:
        if self._compiled is None:
            self._compiled = _compiled(self.template)
        options = {"messages": chat.messages[:count], "tools": chat.tools, "documents": None}
        return _refusing(chat, lambda: self._compiled.render(**options, add_generation_prompt=asks))

    def render(self, conversation: Conversation, count: int | None = None, asks: bool = False) -> str:
        return self._written(conversation, count, asks).replace(_OPEN, "").replace(_CLOSE, "")

    def tagged(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        data = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
        if _OPEN in data or _CLOSE in data:
            raise ValueError(f"{conversation.where} holds the character U+E0F0 or U+E0F1, which are reserved for tags")
        pieces = re.split(f"[{_OPEN}{_CLOSE}]", self._written(conversation, None, False))
        ends = np.cumsum([len(x) for x in pieces]).tolist()
        text, cuts = "".join(pieces), ends[:-1]
        ids = self.encode(text)
        places = cut_tokens(self, text, ids, cuts)
        mask = [0] * len(ids)
        for begin, end, cut in zip(places[::2], places[1::2], cuts[::2], strict=True):
            if begin is None or end is None:
                raise ValueError(
                    f"{conversation.where}: a token crosses a bound of the template's {{% generation %}} tags, near "
                    f"{text[max(0, cut - 20) : cut + 20]!r}: let them begin and end at special tokens or line breaks"
                )
            mask[begin:end] = [1] * (end - begin)
        return ids, mask

    def files(self) -> dict[str, str]:
        return {**super().files(), TEMPLATE_FILE: self.template}


def _compiled(template: str) -> Any:
    """Compile a template in a sandbox. Raises ValueError if Jinja cannot read it, or if it names special tokens."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return _OPEN + caller() + _CLOSE

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = bounded_environment()(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    try:
        # Jinja's own search for undeclared names would evaluate constants, such as a text of 10^10 characters
        names = list(environment.parse(template).find_all(nodes.Name))
        named = {x.name for x in names if x.ctx == "load"} & _NAMED - {x.name for x in names if x.ctx != "load"}
        compiled = environment.from_string(template)
    except Exception as error:  # errors of Jinja, or of the Python compiler for deeply nested code
        raise ValueError(f"the chat template cannot be read ({error}). {_WHAT}") from None
    if named:
        raise ValueError(
            f"the chat template uses {', '.join(sorted(named))}, which a tokenizer.json does not name: write the token's "
            "own text in the template, or set data.tokenizer to a folder of transformers"
        )
    return compiled


# -- bounds of a template ----------------------------------------------------------------------------------------------
#: limits of one rendering: steps (passes of loops, calls, filters, operations), characters and seconds
STEPS, CHARACTERS, SECONDS = 2_000_000, 1 << 28, 20.0
#: functions with results as large as the product of their arguments' sizes
_MULTIPLY = {"replace", "join", "indent", "wordwrap", "expandtabs", "translate", "format", "format_map", "tojson"}


class _Budget:
    """The budget of one rendering: remaining steps, characters and seconds."""

    def __init__(self) -> None:
        self.steps, self.characters, self.end = STEPS, CHARACTERS, time.thread_time() + SECONDS

    def spend(self, characters: int = 0, steps: int = 1) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise ValueError(f"it takes more than {STEPS:,} steps")
        if self.characters < 0:
            raise ValueError(f"it makes more than {CHARACTERS:,} characters")
        if not self.steps % 1024 and time.thread_time() > self.end:
            raise ValueError(f"it takes more than {SECONDS:g} seconds")


#: budget of the current rendering; None while Jinja compiles, when nothing is counted
_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


def _spend(characters: int = 0, steps: int = 1) -> None:
    left = _BUDGET.get()
    if left is not None:
        left.spend(characters, steps)


#: parts of a format string (with `%` or braces) that may hold widths; and fields that take a width from an argument
_FIELDS = re.compile(r"[%)][-#0 +.\d]*|\{[^{}]*|(?<=\})[^{}]*\}")
_ASKS = re.compile(r"[%)][-#0 +.\d]*\*|\{[^{}]*\{")
#: functions with integer arguments that are not sizes; "" means a macro, because the body of a macro is counted
_NO_SIZES = {"", "append", "d", "default", "dict", "get", "join", "namespace", "replace", "reject", "rejectattr"}
_NO_SIZES |= {"select", "selectattr", "set"}


def _size(value: Any, widths: bool = False) -> int:
    """Return how large an argument can make a result: its number of characters or entries, or the value of an integer.
    `widths` adds the numbers in a text."""
    if isinstance(value, int):
        return max(0, int(value))
    if isinstance(value, str):
        return len(value) + (sum(int(x[:18]) for x in re.findall(r"\d+", value)) if widths else 0)
    return len(value) if isinstance(value, Sized) else 1


def _size_of_format(form: str, values: Any) -> int:
    """Return the maximum number of characters of a formatted string; integer values count only if they are widths."""
    asks = _ASKS.search(form) is not None
    most = max([1, *(_size(x, asks) for x in values if asks or not isinstance(x, int))])
    return max(1, len(form) + _size(" ".join(_FIELDS.findall(form)), True)) * most


def _bounded(name: str, value: Any, args: Any, kwargs: Any, call: Any) -> Any:
    """Return `call()`; charge the size that its arguments can cause before the call, and the actual size after it."""
    arguments = [*args, *kwargs.values()]
    if name in ("format", "format_map") and isinstance(value, str):
        _spend(_size_of_format(value, [y for x in arguments for y in (x.values() if isinstance(x, dict) else (x,))]))
    else:
        numbers = 0 if name in _NO_SIZES else sum(_size(x) for x in arguments if isinstance(x, int))
        sizes = [_size(x) for x in arguments if numbers or not isinstance(x, int)]
        size = 1 if isinstance(value, int) else max(1, _size(value))
        _spend(numbers + (size * max(sizes, default=0) if name in _MULTIPLY else 0))
    result = call()
    if isinstance(result, (str, list, tuple, dict)) and result is not value:
        _spend(len(result), steps=0)
    return result


@functools.cache
def bounded_environment() -> type[Any]:
    """Return Jinja's sandbox with limits on the steps and characters of a rendering; they apply in `_refusing`."""
    from jinja2 import nodes, pass_context
    from jinja2.compiler import CodeGenerator
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Filters(dict):  # type: ignore[type-arg]
        """Filters that charge the budget for each call from a compiled template."""

        def __getitem__(self, name: str) -> Any:
            function = super().__getitem__(name)
            skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

            @functools.wraps(function)
            def counted(*args: Any, **kwargs: Any) -> Any:
                value, arguments = args[skipped], args[skipped + 1 :]
                return _bounded(name, value, arguments, kwargs, lambda: function(*args, **kwargs))

            return counted

    class Counting(CodeGenerator):
        """Compiles templates so that each pass of a loop and each call of a macro is charged to the budget."""

        def visit_Template(self, node: Any, frame: Any = None) -> None:
            for inner in (*node.find_all(nodes.For), *node.find_all(nodes.Macro), *node.find_all(nodes.CallBlock)):
                text = sum(len(x.data) for x in inner.find_all(nodes.TemplateData))
                steps = 1 if isinstance(inner, nodes.For) else 8  # a call costs about 8 steps
                costs = [nodes.Const(text), nodes.Const(steps)]
                count = nodes.Call(nodes.EnvironmentAttribute("spend"), costs, [], None, None)
                inner.body.insert(0, nodes.ExprStmt(count).set_lineno(inner.lineno))
            for inner in list(node.find_all(nodes.Concat)):  # the environment never sees the operator ~
                joined = nodes.Filter(nodes.List(inner.nodes), "_concat", [], [], None, None)
                inner.__class__, inner.__dict__ = (
                    nodes.Filter,
                    {**inner.__dict__, **joined.__dict__, "lineno": inner.lineno},
                )
            super().visit_Template(node, frame)

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})
        code_generator_class = Counting

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "optimized": False, "finalize": pass_context(_written)})
            self.filters = Filters(self.filters)
            self.filters["_concat"] = lambda values: "".join(map(str, values))
            self.globals.pop("lipsum")

        spend = staticmethod(_spend)

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            if obj is _spend:
                return obj(*args)
            name = getattr(obj, "__name__", "")
            value = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
            value = value if isinstance(value, (str, list)) else None
            return _bounded(name, value, args, kwargs, lambda: super(Bounded, self).call(context, obj, *args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _spend(_size_of_result(operator, left, right))
            return super().call_binop(context, operator, left, right)

    return Bounded


def _written(context: Any, value: Any) -> Any:
    """Charge the characters of a value that a template writes, and return the value."""
    _spend(len(value) if isinstance(value, str) else 1, steps=0)
    return value


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound on the characters, bits or bytes of an operator's result."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits if bits < 1 << 16 else CHARACTERS + 1  # reject long numbers: multiplying them takes too long
    if operator == "+":
        return sum(len(x) * (1 if isinstance(x, str) else 16) for x in (left, right) if isinstance(x, Sized))
    if operator == "%" and isinstance(left, str):
        values = right.values() if isinstance(right, dict) else right
        return _size_of_format(left, values if isinstance(right, (tuple, dict)) else (right,))
    if operator == "*":
        most = max(1, _size(left)) * max(1, _size(right))
        return most if isinstance(left, str) or isinstance(right, str) else 16 * most  # 16 bytes for each entry
    return 0


def _refusing(chat: Conversation, render: Any) -> str:
    """Return `render()`, limited by a budget. Raises ValueError with the conversation's location for any error."""
    token = _BUDGET.set(_Budget())
    try:
        return render()
    except Exception as error:  # a template may raise anything
        what = str(error)[:200] or type(error).__name__
        raise ValueError(
            f"{chat.where}: the chat template refuses this conversation ({what}): change the row, or set data.template"
        ) from None
    finally:
        _BUDGET.reset(token)


# -- transformers ------------------------------------------------------------------------------------------------------
class TransformersTokenizer(TransformersText, ChatTokenizer):
    """A tokenizer of transformers, with its own chat template or `template`."""

    def __init__(self, source: str, template: str | None) -> None:
        super().__init__(source)
        if template is not None:
            self.tokenizer.chat_template = template
        stored = self.tokenizer.chat_template
        if not stored:
            raise ValueError(f"data.tokenizer {source} has no chat template: set data.template. {_WHAT}")
        self.template = stored if isinstance(stored, str) else json.dumps(stored)
        if _TAGS.search(self.template) and not self.tokenizer.is_fast:
            raise ValueError(
                f"data.tokenizer {source} has no tokenizer.json, which the template's {{% generation %}} tags need: "
                "convert the tokenizer, as save_pretrained of its fast class does"
            )

    def render(self, conversation: Conversation, count: int | None = None, asks: bool = False) -> str:
        options = {"tools": conversation.tools, "tokenize": False, "add_generation_prompt": asks}
        messages = conversation.messages[:count]
        return _refusing(conversation, lambda: self._applied(messages, **options))

    def _applied(self, messages: Any, **options: Any) -> Any:
        with templates_compiled_in(bounded_environment()), panics_named(self.source):
            return self.tokenizer.apply_chat_template(messages, **options)

    def tagged(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        options["tokenizer_kwargs"] = {"verbose": False}
        messages, tools = conversation.messages, conversation.tools
        encoded: Any = _refusing(conversation, lambda: self._applied(messages, tools=tools, **options))
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])
