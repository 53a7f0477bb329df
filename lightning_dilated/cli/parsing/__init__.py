"""The parser of fit, validate, test and predict, with short errors, suggestions, and help for the keys of classes."""

from lightning_dilated.cli.parsing.parser import Parser

__all__ = ["Parser"]
