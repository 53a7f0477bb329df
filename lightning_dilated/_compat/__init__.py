"""Private interfaces of torch, Lightning and CPython, each behind one function."""

__all__: list[str] = []
