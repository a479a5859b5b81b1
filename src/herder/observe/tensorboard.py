"""TensorBoard files, where the optional package is installed; nothing else may import it.

Written with the package's own writer, which needs numpy alone: observing loads no torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from herder.errors import ResourceError
from herder.observe.events import EvaluationFinished, Event, RouterStats, StepFinished


def tensorboard_is_installed() -> bool:
    """Whether `TensorBoardSink` can be made."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardSink:
    """Writes the numbers of steps and evaluations as scalars below `directory`.

    Raises ResourceError where the package is not installed.
    """

    def __init__(self, directory: Path) -> None:
        if not tensorboard_is_installed():
            raise ResourceError(
                "TensorBoard is not installed: pip install 'herder[tensorboard]', "
                "or --set observe.tensorboard=false."
            )
        # The package is optional and takes 0.7 s to import.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        protocol: Any = event_pb2
        self._event, self._scalar, self._tensor = protocol.Event, scalar_pb, make_tensor_proto
        self._histogram_metadata = create_summary_metadata(None, None)
        self._writer = EventFileWriter(str(directory))

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Add the event's numbers; events without any are passed over."""
        if not isinstance(event, StepFinished | RouterStats | EvaluationFinished):
            return
        written = self._event(wall_time=unix_seconds, step=event.step)
        for tag, value in _scalars(event).items():
            written.summary.MergeFrom(self._scalar(tag, value))
        if isinstance(event, RouterStats):
            # [expert, expert + 1, selections]: a bar an expert, as TensorBoard stores histograms.
            buckets = [(index, index + 1, count) for index, count in enumerate(event.selections)]
            written.summary.value.add(
                tag=f"routers/layer_{event.layer}/selections",
                tensor=self._tensor(buckets, dtype="float64"),
                metadata=self._histogram_metadata,
            )
        self._writer.add_event(written)
        if isinstance(event, StepFinished | EvaluationFinished):
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _scalars(event: StepFinished | RouterStats | EvaluationFinished) -> dict[str, float]:
    """The numbers of an event by tag; what is not known is left out."""
    match event:
        case EvaluationFinished():
            return {"evaluation/loss": event.loss, "evaluation/perplexity": event.perplexity}
        case RouterStats():
            routers = f"routers/layer_{event.layer}"
            return {
                f"{routers}/imbalance": event.imbalance,
                f"{routers}/entropy_share": event.entropy / (event.max_entropy or 1.0),
                f"{routers}/dead_experts": len(event.dead),
                f"{routers}/dominant_experts": len(event.dominant),
                f"{routers}/dropped_tokens": event.dropped_tokens,
            }
    scalars = {
        "train/loss": event.loss,
        "train/aux_loss": event.aux_loss,
        "train/z_loss": event.z_loss,
        "train/gradient_norm": event.gradient_norm,
        "train/learning_rate": event.learning_rate,
        "speed/tokens_per_second": event.tokens_per_second,
        "speed/model_flops_utilization": event.model_flops_utilization,
        "memory/peak_memory_gb": event.peak_memory_bytes / 1e9,
    }
    return {tag: value for tag, value in scalars.items() if value is not None}
