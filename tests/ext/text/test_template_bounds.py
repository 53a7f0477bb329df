"""Limits on steps and characters of chat templates, even if one operation would create a huge value; panics."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from lightning_dilated.ext.text.messages import Conversation
from lightning_dilated.ext.text.template import _compiled, _refusing
from lightning_dilated.ext.text.tokenizer import encode, panics_named

CHAT = Conversation([{"role": "user", "content": "hi"}], "row 0")
GROWN = "{%% set ns = namespace(x='aa') %%}{%% for i in range(99) %%}%s{%% endfor %%}{{ ns.x|length }}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output of loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "*": "{{ 'a' * 10**10 }}",
    "* of lists": "{{ ([0] * 10**10)|length }}",
    "**": "{{ 10**(10**10) }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "~": GROWN % "{% set ns.x = ns.x ~ ns.x %}",
    "+": GROWN % "{% set ns.x = ns.x + ns.x %}",
    "set": GROWN % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "replace": GROWN % "{% set ns.x = ns.x.replace('a', 'aaaaaaaaaa') %}",
    "|replace": GROWN % "{% set ns.x = ns.x|replace('a', 'aaaaaaaaaa') %}",
    "join": GROWN % "{% set ns.x = ns.x.join([ns.x, ns.x]) %}",
    "center": "{{ 'a'.center(9999999999) }}",
    "|center": "{{ 'a'|center(9999999999) }}",
    "|indent": "{{ 'a\nb'|indent(9999999999) }}",
    "%": "{{ '%9999999999d' % 1 }}",
    "%*": "{{ '%*d' % (9999999999, 1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "fields": "{{ ('{:999}' * 99999).format(1) }}",
    "format with a width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "format with a text": "{{ '{:{}}'.format(1, '9999999999') }}",
    "format with a key": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 9999999999}) }}",
    "|format": "{{ '%9999999999d'|format(1) }}",
    "% with a key": "{{ '%(a)9999999999d' % {'a': 1} }}",
    "a precision": "{{ '%.9999999999f' % 1 }}",
    "|tojson": "{{ [1, 2]|tojson(indent=9999999999) }}",
    "|batch": "{{ [1]|batch(9999999999, 1)|list }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dilated.ext.text.template.STEPS", 200_000)
    monkeypatch.setattr("lightning_dilated.ext.text.template.CHARACTERS", 1 << 22)
    compiled, begin = _compiled(HOSTILE[name]), time.perf_counter()
    with pytest.raises(
        ValueError, match=r"row 0: the chat template refuses this conversation \((it takes|it makes|max)"
    ):
        _refusing(CHAT, lambda: compiled.render(messages=CHAT.messages))
    assert time.perf_counter() - begin < 30


def test_templates_in_bounds_are_the_same() -> None:
    text = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m['content']|trim }}{{ loop.index }}/{{ loop.length }}\n{% endfor %}"
    )
    text += "{% macro f(n) %}<{{ n }}>{% endmacro %}{{ f(3) }}{{ '%s-%d' % ('a', 2) }}{{ 'a,b'.split(',')|join('+') }}"
    text += "{{ 2 * 3 }}"
    assert _refusing(CHAT, lambda: _compiled(text).render(messages=CHAT.messages)) == "user: hi1/1\n<3>a-2a+b6"


NUMBERS = [
    "{{ messages|tojson(indent=4) }}{{ m.content|tojson(indent=4) }}{{ m.id|tojson(indent=4) }}",
    "{{ '%s: %s' % (m.role, m.content) }}{{ '%s' % m.id }}{{ '%s %d'|format(m.content, m.id) }}",
    "{{ '{}: {}'.format(m.content, m.id) }}{{ 'on 20261127: {a}'.format_map({'a': m.content}) }}",
    "{{ m.content.replace('Call', '4915112345678') }}{{ ['a', 'b']|join('2026112712') }}{{ 'a'|replace('a', m.id) }}",
    "{% macro f(n) %}{{ n }}{% endmacro %}{{ f(m.id) }}{{ m.content|indent(4) }}{{ m.get('x', 4915112345678) }}",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_of_a_message_are_no_sizes(text: str) -> None:
    message = {"role": "user", "content": "Call +4915112345678, id 2026112712123456789", "id": 4915112345678}
    written = _refusing(CHAT, lambda: _compiled(text).render(messages=[message], m=message))
    assert "4915112345678" in written


def test_seconds_are_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**9, 1000)).__next__)
    assert _refusing(CHAT, lambda: _compiled("{% for i in range(9999) %}{% endfor %}a").render(messages=[])) == "a"
    monkeypatch.setattr("lightning_dilated.ext.text.template.SECONDS", -1.0)
    with pytest.raises(ValueError, match="it takes more than -1 seconds"):
        _refusing(CHAT, lambda: _compiled("{% for i in range(9999) %}{% endfor %}").render(messages=[]))


def test_a_template_that_no_compiler_takes() -> None:
    with pytest.raises(ValueError, match="the chat template cannot be read"):
        _compiled("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_a_panic_is_an_error() -> None:
    class PanicException(BaseException):
        pass

    class Panics:
        def encode(self, *args: Any, **kwargs: Any) -> Any:
            raise PanicException("index out of bounds")

    with pytest.raises(ValueError, match=re.escape("tokenizer a.json does not work (index out of bounds)")):
        encode(Panics(), "text", "a.json")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), panics_named("a.json"):
        raise KeyboardInterrupt
