"""Private interfaces of torch, Lightning and CPython that we use, each behind a function of its own."""

__all__: list[str] = []
