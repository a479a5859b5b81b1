"""--set on a model: one field of its architecture, and everything else as it was."""

import pytest

from herder.cli.models import resolve
from herder.cli.overrides import overridden
from herder.errors import ConfigError


def test_one_field_is_replaced_and_the_rest_stays() -> None:
    source = resolve("mixtral-8x7b-v0.1")
    changed = overridden(source, ("moe.num_experts_per_token=4",))
    assert changed.architecture.moe is not None
    assert changed.architecture.moe.num_experts_per_token == 4
    assert overridden(changed, ("moe.num_experts_per_token=2",)) == source
    assert overridden(source, ()) == source


def test_a_model_without_experts_says_so() -> None:
    with pytest.raises(ConfigError, match=r"qwen3-8b: moe: this architecture has none"):
        overridden(resolve("qwen3-8b"), ("moe.num_experts_per_token=4",))
