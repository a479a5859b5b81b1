"""What of a plan cannot be run yet: told before a process group, a GPU or torch is there.

Planning goes further than running: a cluster may be priced for layouts that this build cannot
train in.
"""

from __future__ import annotations

from herder.errors import PlanError
from herder.plan.training import TrainingPlan

_WOULD_DO = {
    "expert_parallel_size": (
        "experts are held whole, or sharded as other parameters are: give a layout with "
        "expert_parallel_size: 1, and zero_stage: 3 where experts are what does not fit"
    ),
    "context_parallel_size": (
        "a rank holds its sequences whole: give a layout with context_parallel_size: 1, and "
        "tensor_parallel_size or train.recompute: full where their activations do not fit"
    ),
}


def refuse_unsupported(plan: TrainingPlan) -> None:
    """Raise PlanError, with what would do, for a plan that can be made but not run."""
    problems = [
        f"layout: {name}={degree} can be planned, not run yet ({plan.model}). In this build "
        f"{would_do}."
        for name, would_do in _WOULD_DO.items()
        if (degree := getattr(plan.layout, name)) > 1
    ]
    if problems:
        raise PlanError("\n".join(problems))
