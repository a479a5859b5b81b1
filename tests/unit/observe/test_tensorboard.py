"""TensorBoard: the scalars are in the files, read back with the package's own reader."""

from pathlib import Path

import pytest

from herder.observe.events import EvaluationFinished, Notice, StepFinished
from herder.observe.tensorboard import TensorBoardSink, tensorboard_is_installed


@pytest.mark.skipif(not tensorboard_is_installed(), reason="pip install 'herder[tensorboard]'")
def test_the_numbers_of_steps_and_evaluations_are_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        event = StepFinished(
            step=step,
            loss=2.0 / step,
            gradient_norm=1.0,
            learning_rate=1e-3,
            tokens=10,
            seconds=0.1,
            tokens_per_second=100.0,
            model_flops_utilization=None,
            peak_memory_bytes=10,
            seconds_left=0.0,
        )
        sink.receive(event, unix_seconds=100.0)
    evaluated = EvaluationFinished(step=2, loss=3.0, perplexity=20.0, tokens=10, seconds=0.1)
    sink.receive(evaluated, unix_seconds=101.0)
    sink.receive(Notice(message="nothing to plot"), unix_seconds=102.0)
    sink.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    tags = repr(read.Tags()["tensors"])
    assert "train/loss" in tags
    assert "evaluation/perplexity" in tags
    assert "speed/model_flops_utilization" not in tags
    losses = read.Tensors("train/loss")
    assert [(loss.step, loss.tensor_proto.float_val[0]) for loss in losses] == [(1, 2.0), (2, 1.0)]
