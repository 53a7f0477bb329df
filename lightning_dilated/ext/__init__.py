"""What attaches to the core: engines of layers, domains and instruments, a folder each; `_extensions.py` names their parts.

`MAY_IMPORT` says which other folders of `ext/` a folder imports. `.ci/lint.py` checks it.
"""

#: folder: the others that it may import; one without a row imports the core alone
MAY_IMPORT = {
    "decoding": ("profiling",),
    "evaluation": ("transformers",),
    "export": ("slides", "transformers"),
    "genomes": ("decoding", "evaluation", "text"),
    "planning": ("recurrence", "slides"),
    "profiling": ("planning",),
    "slides": ("pooled", "text"),
    "transformers": ("decoding",),
}
