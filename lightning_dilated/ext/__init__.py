"""Extensions of the core, a folder each. `MAY_IMPORT` names the other folders that a folder of `ext/` may import."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {}
