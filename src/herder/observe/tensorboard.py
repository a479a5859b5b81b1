"""TensorBoard files, where the optional package is installed; nothing else may import it.

Written with the package's own writer, which needs numpy alone: observing loads no torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from herder.errors import ResourceError
from herder.observe.events import EvaluationFinished, Event, StepFinished


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
        # The package is optional and takes 0.4 s to import.
        from tensorboard.summary import Writer

        self._writer = Writer(str(directory))

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Add the event's numbers; events without any are passed over."""
        if isinstance(event, StepFinished):
            scalars = {
                "train/loss": event.loss,
                "train/gradient_norm": event.gradient_norm,
                "train/learning_rate": event.learning_rate,
                "speed/tokens_per_second": event.tokens_per_second,
                "memory/peak_memory_gb": event.peak_memory_bytes / 1e9,
            }
            if event.model_flops_utilization is not None:
                scalars["speed/model_flops_utilization"] = event.model_flops_utilization
        elif isinstance(event, EvaluationFinished):
            scalars = {"evaluation/loss": event.loss, "evaluation/perplexity": event.perplexity}
        else:
            return
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, event.step, wall_time=unix_seconds)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
