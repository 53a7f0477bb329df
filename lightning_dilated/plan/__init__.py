"""`lightning-dilated plan`: memory, bytes, time and the longest sequence of a run, before anything is started."""

from __future__ import annotations

__all__ = ["run"]


def run(argv: list[str]) -> None:
    """Parse, reckon, print, and draw if asked to."""
    from lightning_dilated.plan.options import parser, settled  # what they import takes seconds to load
    from lightning_dilated.plan.report import report
    from lightning_dilated.planning.memory_plot import memory_plot

    args = parser().parse_args(argv)
    told = report(settled(args))
    print("\n".join(told.lines))
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        memory_plot(told.bars, told.limit, args.plot, told.title, told.caption)
        print(f"\nplot: {args.plot}")
