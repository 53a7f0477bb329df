"""Plan training steps on 1 to 4,096 GPUs from measurements of one GPU, and compare with measured steps, in percent.

    python benchmarks/simulate_scale.py --machine h200.json --plot scale.png
    python benchmarks/simulate_scale.py --machine h200.json --ranks 1 2 4 --tokens 1048576 --recompute block
      --measured 1:1048576:2529.7 4:1048576:2600 2:262144:530:gather
    python benchmarks/simulate_scale.py --machine h200.json --measured 1:65536:140 4:65536:150 --calibrate

The pattern is geometric(first, N), with the whole sequence as the last segment. --measured is ranks:tokens of a
rank:milliseconds, and then the exchange if `auto` did not choose it. --calibrate adds the overhead of one GPU's
measured steps: the time beyond the parts of a step (the host, and lower clocks under full load). Measure links with
`lightning-dilated bench links`.
"""

from __future__ import annotations

import argparse
import datetime
from dataclasses import replace
from pathlib import Path

from scale_tables import FORMS, Setting, scale_plot, sweep, table

from lightning_dilated.ext.planning.machine import Machine
from lightning_dilated.memory.recompute import POLICIES
from lightning_dilated.sequence.links import NUMBERS, Links


def measured(text: str) -> tuple[int, int, float, str]:
    """Parse ranks:tokens:milliseconds[:exchange]."""
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text!r} is not ranks:tokens:milliseconds[:exchange]")
    return int(parts[0]), int(parts[1]), float(parts[2]), parts[3] if len(parts) == 4 else "auto"


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--machine", type=Path, required=True, help="JSON of benchmarks/step_parts.py")
    p.add_argument("--tokens", type=int, nargs="+", default=[32768, 262144], help="of a GPU")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 64, 512, 4096])
    p.add_argument("--ranks-per-node", type=int, default=8)
    p.add_argument("--exchanges", nargs="+", default=list(FORMS))
    p.add_argument("--recompute", default="none", choices=POLICIES)
    p.add_argument("--links", type=Path, help="file of `lightning-dilated bench links`; else the defaults")
    for name in NUMBERS:
        p.add_argument(f"--{name}", type=float, help=f"Links.{name}, whatever the file says")
    p.add_argument("--measured", type=measured, nargs="+", default=[], metavar="RANKS:TOKENS:MS[:EXCHANGE]")
    p.add_argument(
        "--calibrate", action="store_true", help="what steps of one GPU (--measured) take beyond their parts"
    )
    p.add_argument("--no-table", action="store_true", help="compare with --measured only")
    p.add_argument("--plot", type=Path, help="PNG of tokens/s a GPU")
    p.add_argument("--record", type=Path, help="append what is printed to this file")
    return p.parse_args()


def calibrated(setting: Setting, measurements: list[tuple[int, int, float, str]]) -> Setting:
    """Add the overhead of measured steps on one GPU, or 0 if the parts of a step take longer than the step."""
    alone = sorted((tokens, ms) for ranks, tokens, ms, _ in measurements if ranks == 1)
    if not alone:
        raise SystemExit("--calibrate needs a step of one GPU: --measured 1:TOKENS:MS.")
    over = tuple((tokens, max(0.0, ms / 1e3 - setting.step(tokens, 1).seconds)) for tokens, ms in alone)
    return replace(setting, overheads=over)


def compared(setting: Setting, measurements: list[tuple[int, int, float, str]]) -> list[str]:
    """Compare planned with measured steps."""
    lines = [
        "| GPUs | tokens a GPU | exchange | measured ms | planned ms | deviation | exposed ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, tokens, ms, exchange in measurements:
        step = setting.step(tokens, ranks, exchange)
        planned_ms = step.seconds * 1e3
        off = round(100 * (planned_ms / ms - 1), 1) or 0.0
        lines.append(
            f"| {ranks} | {tokens:,} | {step.exchange or 'none'} | {ms:.1f} | {planned_ms:.1f} | {off:+.1f} % "
            f"| {step.exposed * 1e3:.2f} |"
        )
    return lines


def main() -> None:
    args = options()
    links = Links() if args.links is None else Links.load(args.links)
    numbers = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    links = replace(links, **numbers, source="") if numbers else links
    setting = Setting(Machine.load(args.machine), args.ranks_per_node, links, args.recompute)
    if args.calibrate:
        setting = calibrated(setting, args.measured)
    lines = [f"\n{datetime.date.today()}. {setting.assumptions()}\n"]
    if not args.no_table:
        steps = sweep(setting, args.tokens, args.ranks, args.exchanges)
        lines += [*table(setting, steps), ""]
        if args.plot:
            scale_plot(steps, args.plot, setting.assumptions())
    if args.measured:
        lines += [*compared(setting, args.measured), ""]
        if args.calibrate:
            lines += ["The rows of one GPU gave what is beyond the parts of a step, and so show nothing.", ""]
    print("\n".join(lines))
    if args.record:
        with args.record.open("a") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
