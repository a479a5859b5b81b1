"""TensorBoard: the scalars are in the files, read back with the package's own reader."""

from pathlib import Path

import pytest

from herder.observe.events import EvaluationFinished, Notice, RouterStats, StepFinished
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


@pytest.mark.skipif(not tensorboard_is_installed(), reason="pip install 'herder[tensorboard]'")
def test_a_router_is_scalars_and_a_histogram_of_its_experts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    sink = TensorBoardSink(tmp_path)
    event = RouterStats(
        step=7,
        layer=3,
        tokens=20,
        selections=(10, 25, 5, 0),
        imbalance=2.5,
        entropy=0.5,
        max_entropy=2.0,
        dead=(3,),
        dominant=(),
        dropped_tokens=0,
    )
    sink.receive(event, unix_seconds=100.0)
    sink.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    (imbalance,) = read.Tensors("routers/layer_3/imbalance")
    (selections,) = read.Tensors("routers/layer_3/selections")
    (share,) = read.Tensors("routers/layer_3/entropy_share")
    assert (imbalance.step, make_ndarray(imbalance.tensor_proto)) == (7, 2.5)
    assert make_ndarray(share.tensor_proto) == 0.25
    expected = [[0, 1, 10], [1, 2, 25], [2, 3, 5], [3, 4, 0]]
    assert make_ndarray(selections.tensor_proto).tolist() == expected
    metadata = read.SummaryMetadata("routers/layer_3/selections")
    assert metadata.plugin_data.plugin_name == "histograms"
