"""`lightning-dilated plan`: memory, bytes, time and the longest sequence of a run, before anything is started."""

from __future__ import annotations

__all__ = ["run"]

#: the option that has true steps run
FIND_MAX = {"--find-max", "--find_max"}


def run(argv: list[str]) -> None:
    """Parse, reckon, print, and draw if asked to; with --find-max train on the devices that are here instead."""
    if FIND_MAX & set(argv):
        from lightning_dilated.cli.find_max.command import run as find_max

        find_max([word for word in argv if word not in FIND_MAX])
        return
    from lightning_dilated.cli.plan.options import parser
    from lightning_dilated.cli.plan.report import report
    from lightning_dilated.cli.plan.request import settled  # what it imports takes seconds to load
    from lightning_dilated.planning.memory_plot import memory_plot

    args = parser().parse_args(argv)
    told = report(settled(args))
    print("\n".join(told.lines))
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        memory_plot(told.bars, told.limit, args.plot, told.title, told.caption)
        print(f"\nplot: {args.plot}")
