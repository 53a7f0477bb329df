"""The parser of fit, validate, test and predict: short errors that name the key that was meant, and the keys of classes."""

from lightning_dilated.cli.parsing.parser import Parser

__all__ = ["Parser"]
