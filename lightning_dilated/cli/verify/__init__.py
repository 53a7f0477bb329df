"""`lightning-dilated verify`: this machine's ranks against one rank's definition of the same call."""

from lightning_dilated.cli.verify.command import run

__all__ = ["run"]
