"""Which experts the routers chose over a run, as one picture: a band a layer, a row an expert.

Owns the drawing, an SVG of plain shapes that any browser and editor shows. Knows nothing but
`RouterStats`; steps go from left to right and share columns where there are many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from herder.observe.events import Event, RouterStats, RunFinished, RunInterrupted
from herder.observe.sinks import read_events

_MAX_COLUMNS = 128
"""An even number."""
_LEFT, _TOP, _GAP, _BOTTOM, _WIDTH = 64, 44, 8, 28, 600
_LEVELS = ("#8c510a", "#bf812d", "#dfc27d", "#f6e8c3", "#f5f5f5")
_LEVELS += ("#c7eae5", "#80cdc1", "#35978f", "#01665e")
"""From a quarter of the balanced share or less to four times or more; half an octave each."""
_NEVER = "#000000"
_LEGEND = ((_NEVER, "never"), (_LEVELS[0], "1/4"), (_LEVELS[4], "balanced"), (_LEVELS[8], "4 x"))


class ExpertMapSink:
    """Draws the map into a file when a run ends, also one that was resumed or interrupted.

    It is drawn from the run's own log, so that it shows what earlier processes did too.
    """

    def __init__(self, log: Path, picture: Path) -> None:
        self._log, self._picture = log, picture

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Draw when a run ends; a run without routed experts gets no picture."""
        if isinstance(event, RunFinished | RunInterrupted):
            told = (each for each in read_events(self._log) if isinstance(each, RouterStats))
            picture = expert_map(told)
            if picture is not None:
                self._picture.write_text(picture, encoding="utf-8")

    def close(self) -> None:
        """Nothing is held."""


def expert_map(stats: Iterable[RouterStats]) -> str | None:
    """An SVG document of events in the order of their steps; None where there are none.

    A step told again, as after a crash, is passed over: it is the same again.
    """
    layers = dict[int, _Columns]()
    for each in stats:
        layers.setdefault(each.layer, _Columns(each.step)).add(each)
    if not layers:
        return None
    shapes, y = list[str](), float(_TOP)
    for layer, told in sorted(layers.items()):
        row_height = min(14.0, max(2.0, 128 / len(told.columns[0])))
        height = row_height * len(told.columns[0])
        shapes += [_text(_LEFT - 6, y + height / 2 + 4, f"layer {layer}", anchor="end")]
        shapes += _cells(told.columns, y, row_height)
        y += height + _GAP
    first = min(told.first_step for told in layers.values())
    last = max(told.last_step for told in layers.values())
    shapes += [
        _text(_LEFT, 16, "experts chosen, against a balanced share: a row an expert"),
        *_legend(),
        _text(_LEFT, y + 10, f"step {first}"),
        _text(_LEFT + _WIDTH, y + 10, f"step {last}", anchor="end"),
    ]
    width, height = _LEFT + _WIDTH + 12, y + _BOTTOM - _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


class _Columns:
    """One layer's selections, events joined two by two whenever there are too many columns."""

    def __init__(self, first_step: int) -> None:
        self.columns = list[list[int]]()
        self.first_step, self.last_step = first_step, first_step - 1
        self._events_a_column, self._events_in_last = 1, 1

    def add(self, stats: RouterStats) -> None:
        if stats.step <= self.last_step:
            return
        self.last_step = stats.step
        if self._events_in_last < self._events_a_column:
            self.columns[-1] = _sums(self.columns[-1], stats.selections)
            self._events_in_last += 1
            return
        if len(self.columns) == _MAX_COLUMNS:
            self.columns = list(map(_sums, self.columns[::2], self.columns[1::2]))
            self._events_a_column *= 2
        self.columns.append(list(stats.selections))
        self._events_in_last = 1


def _sums(some: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(some, more, strict=True)]


def _cells(columns: Sequence[Sequence[int]], top: float, row_height: float) -> list[str]:
    """One path a colour; neighbours of a row in one colour are one rectangle."""
    width, paths = _WIDTH / len(columns), dict[str, list[str]]()
    for expert, row in enumerate(zip(*map(_colours, columns), strict=True)):
        y = top + expert * row_height
        for colour, run in groupby(range(len(row)), key=row.__getitem__):
            first, *rest = run
            left, length = _LEFT + first * width, (1 + len(rest)) * width
            corner = f"M{left:.4g} {y:.4g}h{length:.4g}v{row_height:.4g}h-{length:.4g}z"
            paths.setdefault(colour, []).append(corner)
    return [f'<path fill="{colour}" d="{"".join(path)}"/>' for colour, path in paths.items()]


def _colours(selections: Sequence[int]) -> list[str]:
    balanced = sum(selections) / len(selections) or 1.0
    top = len(_LEVELS) - 1
    return [
        _LEVELS[min(top, max(0, round(2 * math.log2(count / balanced)) + top // 2))]
        if count
        else _NEVER
        for count in selections
    ]


def _legend() -> list[str]:
    shapes, x = list[str](), _LEFT
    for colour, label in _LEGEND:
        shapes.append(
            f'<rect x="{x}" y="24" width="12" height="12" fill="{colour}" stroke="#999"/>'
        )
        shapes.append(_text(x + 16, 34, label))
        x += 80
    return shapes


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'
