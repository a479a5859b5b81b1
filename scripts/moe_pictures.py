"""The pictures of docs/moe.md, from the logs of two runs that differ in one thing.

    herder train recipes/moe_debug.yaml
    herder train recipes/moe_debug.yaml --set model.config.router_aux_loss_coef=0 \
        --set run_directory=runs/moe_debug_free
    python scripts/moe_pictures.py runs/moe_debug runs/moe_debug_free
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from herder.observe.events import RouterStats, StepFinished
from herder.observe.sinks import read_events

Points = list[tuple[int, float]]
LABELS = ("with auxiliary loss", "without")
COLOURS = ("#01665e", "#bf812d")
WIDTH, HEIGHT, LEFT, TOP = 300.0, 180.0, 44.0, 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("with_loss", type=Path)
    parser.add_argument("without", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    labels, folders = LABELS, [arguments.with_loss, arguments.without]
    losses = [losses_of(folder / "events.jsonl") for folder in folders]
    imbalances = [imbalances_of(folder / "events.jsonl") for folder in folders]
    panels = [
        panel("loss, nats a byte", losses, labels, x=0.0),
        panel("imbalance of the worst layer", imbalances, labels, x=LEFT + WIDTH + 30),
    ]
    (arguments.output / "moe_curves.svg").write_text(document(panels), encoding="utf-8")
    for name, folder in zip(("with", "without"), folders, strict=True):
        shutil.copy(folder / "experts.svg", arguments.output / f"moe_experts_{name}.svg")


def losses_of(log: Path) -> Points:
    return [(each.step, each.loss) for each in read_events(log) if isinstance(each, StepFinished)]


def imbalances_of(log: Path) -> Points:
    """By step, averaged over ten."""
    worst = dict[int, float]()
    for each in read_events(log):
        if isinstance(each, RouterStats):
            worst[each.step] = max(worst.get(each.step, 0.0), each.imbalance)
    steps = sorted(worst)
    groups = [steps[start : start + 10] for start in range(0, len(steps), 10)]
    return [(group[-1], sum(worst[step] for step in group) / len(group)) for group in groups]


def panel(title: str, curves: Sequence[Points], labels: Sequence[str], *, x: float) -> str:
    """One plot with its axes and a line a run."""
    steps = [step for curve in curves for step, _ in curve]
    values = [value for curve in curves for _, value in curve]
    last, low, high = max(steps), min(values), max(values)
    span = (high - low) or 1.0

    def place(step: int, value: float) -> str:
        across = LEFT + WIDTH * step / last
        return f"{across:.1f},{TOP + HEIGHT * (high - value) / span:.1f}"

    shapes = [
        f'<text x="{LEFT}" y="16">{title}</text>',
        f'<path d="M{LEFT} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{LEFT - 6}" y="{TOP + HEIGHT}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">step {last}</text>',
    ]
    for index, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        colour = COLOURS[index]
        points = " ".join(place(step, value) for step, value in curve)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        shapes.append(f'<text x="{LEFT + 130 * index}" y="32" fill="{colour}">{label}</text>')
    return f'<g transform="translate({x:g} 0)">' + "\n".join(shapes) + "</g>"


def document(panels: Sequence[str]) -> str:
    width, height = 2 * (LEFT + WIDTH) + 40, TOP + HEIGHT + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
