from __future__ import annotations

from pathlib import Path

import pytest

from herder.config.load import load_run_config, override_architecture, parse_override
from herder.config.run import GpuConfig, LayoutConfig, RunConfig
from herder.errors import ConfigError
from tests.tiny import MOE, tiny_model

MINIMAL = "model: {source: smollm2-135m}\n"


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return load_run_config(path, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(folder, text, *overrides)
    return str(refused.value).replace(f"{folder}/", "")


def test_defaults_fill_what_is_left_out(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.layout == "auto"
    assert config.cluster is None
    assert config.train.optimizer.learning_rate == 3e-4


def test_numbers_in_scientific_notation_and_whole_numbers_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + "train: {optimizer: {learning_rate: 1e-4}, clip_norm: 2}\n")
    assert config.train.optimizer.learning_rate == 1e-4
    assert config.train.clip_norm == 2.0


def test_overrides_are_laid_over_in_order(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        MINIMAL + "train: {steps: 5}\n",
        "train.steps=6",
        "train.steps=7",
        "train.micro_batch_size=null",
        "cluster.gpu=a100-40gb",
        "layout.tensor_parallel_size=2",
        "model.initialize=random",
        "model.override.num_hidden_layers=2",
    )
    assert config.train.steps == 7
    assert config.cluster is not None
    assert config.cluster.gpu == "a100-40gb"
    assert config.layout == LayoutConfig(tensor_parallel_size=2)
    assert config.model.override == {"num_hidden_layers": 2}


def test_an_override_may_hold_equals_signs() -> None:
    assert parse_override("data.source=a=b.txt") == (("data", "source"), "a=b.txt")


@pytest.mark.parametrize("override", ["train.steps", "=5", "train..steps=5", "train.=5"])
def test_an_override_without_a_path_and_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="give a key path and a value"):
        parse_override(override)


def test_all_violations_are_told_together_with_file_line_and_path(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "cluster: {gpu: h100, nodes: two}\n"
        + "layout: {tensor_parallel_sise: 2}\n"
        + "train:\n  stepz: 3\n  sequence_length: 0\n  precision: bf61\n"
        + "observe: 3\n"
    )
    told = refusal(tmp_path, text, "train.steps=ten").splitlines()
    assert told[0] == "8 mistakes:"
    expected = {
        "recipe.yaml:2: cluster.nodes: must be a whole number, given the text 'two'.",
        "recipe.yaml:3: layout.tensor_parallel_sise: unknown key. "
        "Did you mean 'tensor_parallel_size'?",
        "--set train.steps=ten: train.steps: must be a whole number, given the text 'ten'.",
        "recipe.yaml:6: train.sequence_length: must be greater than 0, given 0.",
        "recipe.yaml:7: train.precision: must be one of 'fp32' or 'bf16', given the text 'bf61'. "
        "Did you mean 'bf16'?",
        "recipe.yaml:5: train.stepz: unknown key. Did you mean 'steps'?",
        "recipe.yaml:8: observe: must be a mapping of keys, given 3.",
        "recipe.yaml:2: cluster.gpu: 'h100' is not a known device. Did you mean 'h100-80gb'? "
        "A mapping with the device's own figures does too.",
    }
    assert set(told[1:]) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("clip_norm: 4\n", "clip_norm: unknown key. Did you mean 'train.clip_norm'?"),
        (
            "layout: aut\n",
            "must be one of 'auto' or 'naive', or a mapping of keys, given the text 'aut'",
        ),
        ("train: {schedule: {kind: wsd}}\n", "wsd needs decay_steps, the other kinds"),
        ("train: {compile: 1}\n", "train.compile: must be true or false, given 1."),
        ("train: {compile: yes}\n", "must be true or false, given the text 'yes'."),
        ("train: {steps: 1.5}\n", "train.steps: must be a whole number, given 1.5."),
        ("train: {clip_norm: .inf}\n", "train.clip_norm: must be a finite number, given inf."),
        ("train: {clip_norm: .nan}\n", "train.clip_norm: must be a finite number, given nan."),
        ("serve: {port: 70000}\n", "serve.port: must be at most 65535, given 70000."),
        ("data: {validation_fraction: 1}\n", "must be less than 1.0, given 1."),
        ("data: {source: [a]}\n", "data.source: must be text, given a list of 1."),
        ("run_directory: null\n", "run_directory: must be text, given nothing (null)."),
        (
            "run_directory: ''\n",
            "run_directory: must be text that is not empty, given the text ''.",
        ),
        ("data: {max_documents: 99999999999999999999}\n", "data.max_documents: must be less than"),
        ("3: 4\n", "a key is a word, given 3."),
    ],
)
def test_a_mistake_says_what_would_do(text: str, told: str, tmp_path: Path) -> None:
    assert told in refusal(tmp_path, MINIMAL + text)


def test_a_mistake_within_a_models_own_config_has_its_path(tmp_path: Path) -> None:
    told = refusal(tmp_path, "model: {initialize: random, config: {noise: {std: .nan}}}\n")
    assert told == "recipe.yaml:1: model.config.noise.std: must be a finite number, given nan."


def test_exactly_one_origin_of_the_model(tmp_path: Path) -> None:
    assert "give exactly one of source and config" in refusal(tmp_path, "model: {}\n")


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, "train: {}\n").endswith("model: this key is missing.")


def test_a_device_may_give_its_own_figures(tmp_path: Path) -> None:
    figures = (
        "{name: mine, memory_gb: 10, bf16_tflops: 5, memory_bandwidth_gb_per_second: 100, "
        "intra_node_bandwidth_gb_per_second: 10}"
    )
    config = load(tmp_path, f"{MINIMAL}cluster: {{gpu: {figures}}}\n")
    assert config.cluster is not None
    assert isinstance(config.cluster.gpu, GpuConfig)
    assert config.cluster.gpu.name == "mine"
    incomplete = refusal(tmp_path, f"{MINIMAL}cluster: {{gpu: {{name: mine, memory_gb: x}}}}\n")
    assert "cluster.gpu.memory_gb: must be a number" in incomplete
    assert "cluster.gpu.bf16_tflops: this key is missing" in incomplete


@pytest.mark.parametrize("text", ["", "- 1\n", "just text\n"])
def test_a_recipe_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    assert "a recipe is a mapping of keys" in refusal(tmp_path, text)


def test_a_recipe_that_is_not_there_names_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"no such recipe\. Did you mean 'demo\.yaml'\?"):
        load_run_config(tmp_path / "dem.yaml")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_config(tmp_path)


def test_every_recipe_of_the_repository_loads(repository: Path) -> None:
    recipes = sorted((repository / "recipes").rglob("*.yaml"))
    assert recipes
    for recipe in recipes:
        assert load_run_config(recipe).model is not None


SPARSE = tiny_model(moe=MOE.model_copy(update={"num_experts": 8}))


def test_an_override_replaces_one_field_of_an_architecture() -> None:
    changed = override_architecture(SPARSE, ["moe.num_experts_per_token=4"], where="--set")
    assert changed.moe is not None
    assert changed.moe.num_experts_per_token == 4
    assert override_architecture(changed, ["moe.num_experts_per_token=2"], where="-") == SPARSE


def test_a_tree_of_overrides_does_what_single_ones_do() -> None:
    tree = {"moe": {"aux_loss_coefficient": 0.01, "noise": {"std": 0.1, "decay_steps": 9}}}
    texts = ["moe.aux_loss_coefficient=0.01", "moe.noise={std: 0.1, decay_steps: 9}"]
    changed = override_architecture(SPARSE, tree, where="-")
    assert changed == override_architecture(SPARSE, texts, where="-")
    assert changed != SPARSE


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("moe.num_experts_pr_token=4", "moe.num_experts_pr_token: unknown key. Did you mean 'num_"),
        ("num_experts=3", "num_experts: unknown key. Did you mean 'moe.num_experts'?"),
        ("moe.num_experts_per_token=9", "moe: num_experts_per_token=9 exceeds num_experts=8."),
        ("moe.num_experts_per_token=x", "moe.num_experts_per_token: must be a whole number, given"),
        ("attention.num_key_value_heads=3", "attention: num_key_value_heads=3 does not divide num"),
        ("attention.head_dims=3", "attention.head_dims: unknown key. Did you mean 'head_dim'?"),
        ("moe", "--set moe: give a key path and a value"),
        ("layers=[]", "--set: layers is empty."),
    ],
)
def test_an_override_is_as_strict_as_the_record(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        override_architecture(SPARSE, [override], where="--set")
    assert told in str(refused.value)
    assert str(refused.value).startswith("--set")


def test_a_section_that_a_model_does_not_have_is_told_once() -> None:
    with pytest.raises(ConfigError) as refused:
        override_architecture(tiny_model(), ["moe.num_experts_per_token=4"], where="--set")
    assert str(refused.value) == "--set: moe: this architecture has none."
