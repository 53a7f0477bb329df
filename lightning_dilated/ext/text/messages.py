"""Read and check conversations: the messages of a row of data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
#: an example of a conversation, for error messages
SHAPE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

#: keys by which a message can opt out of training
_SWITCHES = ("weight", "train")


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that chat templates take, the available tools, and the row's location for errors."""

    messages: list[dict[str, Any]]
    where: str
    tools: list[dict[str, Any]] | None = None


def conversation(row: Any, where: str, column: str = "messages") -> Conversation:
    """Read the conversation of a row.

    Args:
        row: a mapping with the key `column`, a list of {"role", "content"}; or with "prompt" and "completion", each a
            text or a list of messages. Optional "tools" are passed to the template. Message keys with a null value are
            dropped. Tools, and `tool_calls` of a message, may be JSON text: values of a table's column have one type.
        where: the row's location, for errors.

    Raises: ValueError for anything else, and for an unknown role.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, but a row is an object such as {SHAPE}")
    if row.get(column) is not None:
        turns = row[column]
    elif row.get("prompt") is not None and row.get("completion") is not None:
        turns = [*_turns(row["prompt"], "user"), *_turns(row["completion"], ANSWERS)]
    else:
        hint = "" if "conversations" not in row else ' (from "conversations": rename from/value to role/content)'
        raise ValueError(
            f"{where} has neither {column!r} nor 'prompt' and 'completion', but {', '.join(map(repr, row)) or 'no key'}: a "
            f"row is {SHAPE}{hint}, or set data.column to the name of the messages"
        )
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError(
            f"{where}: {column!r} must be a list of at least one message, got {str(turns)[:80]!r}: {SHAPE}"
        )
    messages = [_message(x, f"{where}, message {i}") for i, x in enumerate(turns)]
    return Conversation(messages, where, _objects(row.get("tools"), f"{where}: 'tools'"))


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return False if the `weight` or `train` of a message is 0 or false, else True."""
    return all(message.get(name, 1) for name in _SWITCHES)


def part_texts(message: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of a content that is a list of parts, or None if the content is a text or missing."""
    content = message.get("content")
    return None if content is None or isinstance(content, str) else [x["text"] for x in content]


def _turns(value: Any, role: str) -> Sequence[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {str(value)[:80]!r}, but a message is an object with role and content")
    message = {k: v for k, v in value.items() if v is not None}  # tables fill missing keys with nulls
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; roles are {', '.join(ROLES)}: rename it")
    if calls := _objects(message.pop("tool_calls", None), f"{where} ({role}): 'tool_calls'"):
        message["tool_calls"] = calls
    for name in _SWITCHES:
        if message.get(name, 1) not in (0, 1):
            raise ValueError(
                f"{where} ({role}) has {name}: {message[name]!r}; a message is learned or not: set {name} to 0 or 1 (false "
                "or true), or leave it out"
            )
    content = message.get("content")
    if not (_is_text(content) or (content is None and calls)):
        raise ValueError(
            f"{where} ({role}) has the content {str(content)[:80]!r}; it must be a text, or a list of parts such as "
            '{"type": "text", "text": "..."}: images and sounds have no tokens here'
        )
    return {**message, "content": ""} if content == [] else message


def _is_text(content: Any) -> bool:
    """Return whether a content is a text, or a list of parts that are texts."""
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(isinstance(x, Mapping) and x.get("type") == "text" and isinstance(x.get("text"), str) for x in content)


def _objects(value: Any, what: str) -> list[dict[str, Any]] | None:
    """Return a list of objects, or None for an empty list. The list, or each object, may be JSON. Raises ValueError."""
    read = _from_json(value, what)
    several = [read] if isinstance(read, Mapping) else read or []
    objects = [_from_json(x, what) for x in several] if isinstance(several, list) else [None]
    if not all(isinstance(x, Mapping) for x in objects):
        raise ValueError(f"{what} must be a list of objects, or that list as JSON; got {str(value)[:80]!r}")
    return objects or None


def _from_json(value: Any, what: str) -> Any:
    """Parse a text as JSON; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is a text that is not JSON ({error}), but {value[:80]!r}") from None
