"""Models of other libraries with this package's attention; a library is imported only when its functions are called."""

from lightning_dilated.integrations import transformers

__all__ = ["transformers"]
