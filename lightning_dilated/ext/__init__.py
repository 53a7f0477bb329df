"""Extensions of the core, one a folder: engines of layers, domains and instruments. `_extensions.py` names them.

`MAY_IMPORT` says which other folders of `ext/` a folder imports. `.ci/lint.py` checks it.
"""

#: folder: the other folders that it may import; a folder without a row imports the core alone
MAY_IMPORT = {
    "decoding": ("text",),
    "evaluation": ("text", "transformers"),
    "export": ("slides", "transformers"),
    "genomes": ("decoding", "evaluation", "files", "masked", "text"),
    "planning": ("convolution", "explain", "recurrence", "streams"),
    "profiling": ("planning",),
    "recurrence": ("convolution",),
    "slides": ("evaluation", "files", "masked", "pooled", "text"),
    "streams": ("convolution", "recurrence"),
    "text": ("files",),
    "transformers": ("decoding",),
}
