"""A model written by hand: dense layers by a pattern, and nothing that is not understood."""

from pathlib import Path
from typing import Any

import pytest

from herder.config.architecture import ArchitectureConfig, MoeConfig
from herder.config.load import load_run_config
from herder.errors import ConfigError, ModelError
from herder.families.handwritten import HANDWRITTEN
from herder.families.registry import (
    architecture_from_hf,
    architecture_to_hf,
    families,
    family_named,
    family_of,
)
from herder.plan.parameters import active_parameter_count, parameter_count


def read(**changes: Any) -> ArchitectureConfig:
    return architecture_from_hf({**HANDWRITTEN.tiny_config(), **changes}, name="recipe")


def experts(architecture: ArchitectureConfig) -> MoeConfig:
    assert architecture.moe is not None
    return architecture.moe


def dense_layers(architecture: ArchitectureConfig) -> list[int]:
    kinds = enumerate(layer.feed_forward for layer in architecture.layers)
    return [index for index, kind in kinds if kind == "dense"]


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("last 2", [3, 4]),
        ("first 1", [0]),
        ("last 0", []),
        ([0, 4], [0, 4]),
        ([], []),
        (None, []),
        ("first 5", [0, 1, 2, 3, 4]),
    ],
)
def test_a_pattern_says_which_layers_are_dense(
    pattern: str | list[int] | None, layers: list[int]
) -> None:
    architecture = read(num_hidden_layers=5, dense_layers=pattern)
    assert dense_layers(architecture) == layers
    assert (architecture.mlp is None) == (layers == [])


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("last 3", "dense_layers='last 3': there are 2 layers"),
        ("deepest 1", 'dense_layers=\'deepest 1\': it must be "first N", "last N" or a list'),
        ([2], r"dense_layers=\[2\]: layers are 0 to 1"),
        (["0"], "it must be"),
        (1, "it must be"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused_with_what_would_do(pattern: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(dense_layers=pattern)


def test_a_key_that_is_not_known_gets_a_close_match() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'num_experts_per_tok'"):
        read(num_expert_per_tok=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_expert_intermediate_size": 20, "shared_expert_gate": True},
        {"router_scoring": "sigmoid", "router_correction_bias": True, "norm_topk_prob": False},
        {"router_correction_bias": True, "router_bias_update_rate": 1e-3},
        {"router_noise": {"std": 0.1, "decay_steps": 7}, "router_z_loss_coef": 1e-3},
        {"router_aux_loss_coef": 0.01, "qk_norm": "head", "routed_scaling_factor": 2.5},
        {"dense_layers": [], "tie_word_embeddings": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_what_is_written_back_is_the_same_architecture(changes: dict[str, Any]) -> None:
    architecture = read(**changes)
    assert architecture != read() or not changes
    written = architecture_to_hf(architecture, family="herder")
    assert architecture_from_hf(written, name="recipe") == architecture


def test_it_is_found_by_name_and_is_no_published_family() -> None:
    assert family_of({"model_type": "herder"}) is family_named("herder")
    assert "herder" not in families()
    with pytest.raises(ModelError, match="cannot express"):
        architecture_to_hf(read(dense_layers="first 1"), family="mixtral")


def test_the_recipe_is_the_model_it_says(repository: Path) -> None:
    def built(*overrides: str) -> ArchitectureConfig:
        config = load_run_config(repository / "recipes" / "moe.yaml", overrides).model.config
        assert config is not None
        return architecture_from_hf(config, name="recipe")

    architecture = built()
    assert parameter_count(architecture) == 2_764_261_376
    assert active_parameter_count(architecture) == 1_254_311_936
    assert dense_layers(architecture) == [10, 11]
    moe = experts(architecture)
    assert (moe.num_experts, moe.num_experts_per_token) == (8, 2)
    assert (moe.aux_loss_coefficient, moe.noise and moe.noise.std) == (0.01, 0.1)
    for num_experts in (16, 32):
        more = built(f"model.config.num_experts={num_experts}")
        assert experts(more).num_experts == num_experts
    shared = built("model.config.shared_expert_intermediate_size=4096")
    assert experts(shared).shared_expert_intermediate_size == 4096


@pytest.mark.parametrize("name", ["moe_first_step", "moe_debug"])
def test_the_smaller_recipes_are_models_too(repository: Path, name: str) -> None:
    config = load_run_config(repository / "recipes" / f"{name}.yaml").model.config
    assert config is not None
    assert experts(architecture_from_hf(config, name=name)).num_experts == 4
