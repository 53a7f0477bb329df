"""Extensions of the core, each in one folder: engines of layers, domains and instruments. `_extensions.py` lists them.

`MAY_IMPORT` lists the other folders of `ext/` that a folder may import. `.ci/lint.py` checks the imports.
"""

#: the folders that each folder may import; folders that are not listed import only the core
MAY_IMPORT = {
    "decoding": ("text",),
    "evaluation": ("text", "transformers"),
    "export": ("slides", "transformers"),
    "genomes": ("decoding", "evaluation", "files", "masked", "text"),
    "hashed": ("convolution",),
    "planning": ("convolution", "explain", "hashed", "recurrence", "streams"),
    "profiling": ("planning",),
    "recurrence": ("convolution",),
    "slides": ("evaluation", "files", "masked", "pooled", "text"),
    "streams": ("convolution", "hashed", "recurrence"),
    "text": ("files",),
    "transformers": ("decoding",),
}
