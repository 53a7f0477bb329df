"""A row of the data as a conversation: its messages, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
#: what a conversation looks like, for errors
SHAPE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    """Messages as templates take them, the tools that they may call, and where they come from."""

    messages: list[dict[str, Any]]
    where: str
    tools: list[Any] | None = None


def conversation(row: Any, where: str, column: str = "messages") -> Conversation:
    """The conversation of a row.

    Args:
        row: a mapping with `column`, a list of {"role", "content"}; or with "prompt" and "completion", each a text or a list
            of messages. "tools", if there, is passed to the template. Keys of messages whose value is null are left out.
        where: the row's place, for errors.

    Raises: ValueError for anything else, and for an unknown role.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, but a row is an object such as {SHAPE}")
    if row.get(column) is not None:
        turns = row[column]
    elif row.get("prompt") is not None and row.get("completion") is not None:
        turns = [*_turns(row["prompt"], "user"), *_turns(row["completion"], ANSWERS)]
    else:
        more = "" if "conversations" not in row else ' (from "conversations": rename from/value to role/content)'
        raise ValueError(
            f"{where} has neither {column!r} nor 'prompt' and 'completion', but {', '.join(map(repr, row)) or 'no key'}: a "
            f"row is {SHAPE}{more}, or set data.column to the name of the messages"
        )
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError(
            f"{where}: {column!r} must be a list of at least one message, got {str(turns)[:80]!r}: {SHAPE}"
        )
    messages = [_message(x, f"{where}, message {i}") for i, x in enumerate(turns)]
    return Conversation(messages, where, row.get("tools") or None)


def _turns(value: Any, role: str) -> Sequence[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {str(value)[:80]!r}, but a message is an object with role and content")
    message = {k: v for k, v in value.items() if v is not None}  # tables fill what a message lacks with nulls
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; roles are {', '.join(ROLES)}: rename it")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else None
    is_text = isinstance(content, str) or (
        parts is not None and all(isinstance(x, Mapping) and x.get("type") == "text" for x in parts)
    )
    if not is_text:
        raise ValueError(
            f"{where} ({role}) has the content {str(content)[:80]!r}; it must be a text, or a list of parts of the type "
            "'text': images and sounds have no tokens here"
        )
    return message
