"""Which text a model is judged on."""

from __future__ import annotations

from pathlib import Path

import pytest

from herder.config.run import DataConfig
from herder.data.sources import is_held_out
from herder.evaluate.model import texts_of


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(f"text {index}" for index in range(200)))
    return DataConfig(source=str(path), validation_fraction=0.1)


def test_only_what_training_holds_out_is_scored(config: DataConfig) -> None:
    held_out = list(texts_of(config, split="validation"))
    everything = list(texts_of(config, split="all"))
    assert len(everything) == 200
    assert held_out == [text for text in everything if is_held_out(text, fraction=0.1)]
    assert 0 < len(held_out) < 60
