"""The expert map: valid, dead experts seen at a glance, and made from the run's own log."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from herder.observe.events import RouterStats, RunInterrupted
from herder.observe.expert_map import ExpertMapSink, expert_map
from herder.observe.sinks import JsonLinesSink

SVG = "{http://www.w3.org/2000/svg}"
NEVER, BALANCED = "#000000", "#f5f5f5"


def stats(step: int, layer: int, *selections: int) -> RouterStats:
    return RouterStats(
        step=step,
        layer=layer,
        tokens=sum(selections),
        selections=selections,
        imbalance=1.0,
        entropy=1.0,
        max_entropy=1.0,
        dead=(),
        dominant=(),
        dropped_tokens=0,
    )


def cells(svg: str | None) -> dict[str, float]:
    """The area of each colour in the map, as a share of all of it."""
    assert svg is not None
    areas: dict[str, float] = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        sizes = re.findall(r"h([\d.]+)v([\d.]+)", path.attrib["d"])
        area = sum(float(width) * float(height) for width, height in sizes)
        areas[path.attrib["fill"]] = areas.get(path.attrib["fill"], 0.0) + area
    return {colour: round(area / sum(areas.values()), 3) for colour, area in areas.items()}


def test_balance_is_one_colour_and_an_expert_that_is_never_chosen_is_black() -> None:
    balanced = expert_map(stats(step, layer, 5, 5) for step in (1, 2) for layer in (0, 3))
    assert cells(balanced) == {BALANCED: 1.0}
    half = expert_map([stats(1, 0, 5, 5), stats(2, 0, 10, 0)])
    shares = cells(half)
    assert (shares[BALANCED], shares[NEVER]) == (0.5, 0.25)


def test_layers_are_named_and_so_are_the_first_and_last_step() -> None:
    svg = expert_map([stats(10, 2, 1, 1), stats(10, 7, 1, 1), stats(900, 2, 1, 1)])
    assert svg is not None
    words = {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert {"layer 2", "layer 7", "step 10", "step 900"} <= words


def test_many_steps_share_columns_and_lose_no_selection() -> None:
    svg = expert_map(stats(step, 0, *((4, 0) if step % 2 else (0, 4))) for step in range(5000))
    assert cells(svg) == {BALANCED: 1.0}


def test_columns_stay_few_and_in_order() -> None:
    svg = expert_map(stats(step, 0, *((4, 4) if step < 2500 else (8, 0))) for step in range(5000))
    assert svg is not None
    assert cells(svg)[NEVER] == pytest.approx(0.25, abs=0.01)
    assert len(svg) < 5000


def test_a_step_told_again_after_a_crash_counts_once() -> None:
    svg = expert_map([stats(1, 0, 5, 5), stats(2, 0, 5, 5), stats(2, 0, 9, 0), stats(3, 0, 5, 5)])
    assert cells(svg) == {BALANCED: 1.0}


def test_the_picture_is_drawn_from_the_log_when_a_run_ends(tmp_path: Path) -> None:
    log, picture = tmp_path / "events.jsonl", tmp_path / "experts.svg"
    sink, drawn = JsonLinesSink(log), ExpertMapSink(log, picture)
    sink.receive(stats(1, 0, 5, 5), unix_seconds=1.0)
    drawn.receive(stats(1, 0, 5, 5), unix_seconds=1.0)
    assert not picture.exists()
    drawn.receive(RunInterrupted(step=1, signal="SIGTERM"), unix_seconds=2.0)
    assert cells(picture.read_text()) == {BALANCED: 1.0}
    sink.close()


def test_a_dense_run_gets_no_picture(tmp_path: Path) -> None:
    log, picture = tmp_path / "events.jsonl", tmp_path / "experts.svg"
    JsonLinesSink(log).close()
    ended = RunInterrupted(step=1, signal="SIGTERM")
    ExpertMapSink(log, picture).receive(ended, unix_seconds=2.0)
    assert not picture.exists()
