"""The command line: `lightning-dilated` or `python -m lightning_dilated`."""

from lightning_dilated.cli.main import main

__all__ = ["main"]
