"""`lightning-dilated bench`: measurements of this machine: the op, and the links between its ranks."""

from __future__ import annotations

import argparse

from lightning_dilated.cli.bench import attention, links

__all__ = ["run"]

PARTS = {
    "attention": (attention, "the op, forward and backward, next to dense attention of the same FLOPs"),
    "links": (links, 'latency and bandwidth between ranks, for exchange="auto"'),
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("lightning-dilated bench", description="Measure this machine.")
    parts = p.add_subparsers(dest="what", required=True)
    for name, (module, about) in PARTS.items():
        module.options(parts.add_parser(name, help=about, description=f"Measure {about}."))
    return p


def run(argv: list[str]) -> None:
    """Parse, measure, print and record."""
    args = parser().parse_args(argv)
    PARTS[args.what][0].run(args, " ".join(["lightning-dilated bench", *argv]))
