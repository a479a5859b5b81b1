from __future__ import annotations

from typing import Any

import pytest

from herder.config.catalog import model_config_json
from herder.errors import ConfigError, ModelError
from herder.families.quantization import Precision, Quantization, read_quantization

FP8_BLOCKS = Precision("fp8", (128, 128))
ATTENTION = "model.layers.3.self_attn.q_proj"
EXPERT = "model.layers.3.mlp.experts.17.gate_proj"


def read(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization({"quantization_config": config}, where="my model")
    assert quantization is not None
    return quantization


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], **changes}


def group(targets: list[str], kind: str = "float", bits: int = 8, **weights: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": "channel", "symmetric": True, **weights}
    return {"targets": targets, "weights": weights, "input_activations": None}


def compressed(
    *groups: dict[str, Any], told: str = "float-quantized", **changes: Any
) -> dict[str, Any]:
    named = {f"group_{index}": each for index, each in enumerate(groups)}
    method = {"quant_method": "compressed-tensors", "format": told, "config_groups": named}
    return {**method, "ignore": ["lm_head"], "version": "0.10.2", **changes}


def test_a_config_without_quantization_has_none() -> None:
    assert read_quantization(model_config_json("llama-3.1-405b"), where="x") is None


def test_deepseek_v3_quantizes_attention_and_experts_in_blocks() -> None:
    quantization = read_quantization(model_config_json("deepseek-v3"), where="x")
    assert quantization is not None
    for name in ("self_attn.kv_a_proj_with_mqa", "mlp.down_proj", "mlp.experts.255.up_proj"):
        assert quantization.precision_of(f"model.layers.3.{name}") == FP8_BLOCKS


def test_gpt_oss_quantizes_experts_only() -> None:
    quantization = read_quantization(model_config_json("gpt-oss-120b"), where="x")
    assert quantization is not None
    mxfp4 = Precision("mxfp4", (1, 32), bits=4)
    assert quantization.precision_of("model.layers.35.mlp.experts.down_proj") == mxfp4
    assert quantization.precision_of("model.layers.35.self_attn.o_proj") is None


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.router",
        "language_model.model.layers.3.feed_forward.router",
        "model.layers.3.block_sparse_moe.gate",
        "model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.input_layernorm",
        "model.layers.3.self_attn.q_norm",
        "model.norm",
        "model.embed_tokens",
        "lm_head",
    ],
)
def test_router_norms_embedding_and_head_are_never_quantized(module: str) -> None:
    everything = compressed(group(["Linear", f"re:.*{module}"]), ignore=[])
    assert read(fp8()).precision_of(module) is None
    assert read(everything).precision_of(module) is None
    assert read(everything).precision_of(EXPERT) == Precision("fp8", (1, 0))


@pytest.mark.parametrize(
    "ignored",
    [
        "model.layers.3.self_attn.q_proj",
        "language_model.model.layers.3.self_attn.q_proj",
        "model.language_model.layers.3.self_attn.q_proj",
        "layers.3.self_attn.q_proj",
        "model.layers.3.self_attn",
        "model.layers.*.self_attn",
        "self_attn",
        "re:.*self_attn.*",
        r"re:model\.layers\.\d+\.self_attn",
        r"re:^language_model\.model\.layers\.3\.self_attn\.q_proj$",
        r"model\.layers\.(1|3)\.self_attn",
    ],
)
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_an_ignored_module_is_found_under_any_prefix(ignored: str, prefix: str) -> None:
    for config in (fp8(modules_to_not_convert=[ignored]), compressed(group(["Linear"]))):
        quantization = read({**config, "ignore": [ignored]})
        assert quantization.precision_of(f"{prefix}layers.3.self_attn.q_proj") is None
        assert quantization.precision_of(f"{prefix}layers.3.mlp.up_proj") is not None


@pytest.mark.parametrize(
    "ignored", ["mlp.gate", "model.layers.1", "model", "vision_tower", "re:.*mlp.gate$", "q_pro"]
)
def test_a_name_stands_for_whole_parts_only(ignored: str) -> None:
    quantization = read(fp8(ignored_layers=[ignored]))
    for module in ("model.layers.13.mlp.gate_proj", "model.layers.13.self_attn.q_proj"):
        assert quantization.precision_of(module) == FP8_BLOCKS


def test_a_vision_tower_in_the_list_does_not_spare_the_same_layer_of_the_text() -> None:
    quantization = read(fp8(ignored_layers=["vision_model.layers.3.self_attn.q_proj"]))
    assert quantization.precision_of(ATTENTION) == FP8_BLOCKS


def test_what_no_group_names_is_plain_and_takes_no_precision_from_another() -> None:
    experts = compressed(group(["re:.*experts.*"], bits=4, kind="int"), told="pack-quantized")
    assert read(experts).precision_of(ATTENTION) is None
    assert read(experts).precision_of(EXPERT) == Precision("packed", (1, 0), bits=4)


def test_each_group_keeps_its_own_precision_and_the_narrower_target_wins() -> None:
    experts = group(["re:.*experts.*"], "int", 4, strategy="group", group_size=32, symmetric=False)
    mixed = compressed(
        {**group(["Linear"], strategy="block", block_structure=[128, 128])},
        {**experts, "format": "pack-quantized"},
        {**group([ATTENTION], strategy="tensor")},
        {**group(["re:.*o_proj"]), "weights": None},
    )
    quantization = read(mixed)
    assert quantization.precision_of(EXPERT) == Precision("packed", (1, 32), 4, symmetric=False)
    assert quantization.precision_of(ATTENTION) == Precision("fp8", (0, 0))
    assert quantization.precision_of("model.layers.3.mlp.up_proj") == FP8_BLOCKS


def test_the_other_methods_say_what_shares_a_scale() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    awq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
    }
    for config, precision in (
        (gptq, Precision("gptq", (1, 128), 4, symmetric=False, zero_offset=1)),
        ({**gptq, "group_size": -1}, Precision("gptq", (1, 0), 4, symmetric=False, zero_offset=1)),
        ({**gptq, "checkpoint_format": "gptq_v2"}, Precision("gptq", (1, 128), 4, symmetric=False)),
        (awq, Precision("awq", (1, 64), 4, symmetric=False)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Precision("fp8", (1, 0))),
        (fp8(weight_block_size=None), Precision("fp8", (0, 0))),
        (
            compressed(group(["Linear"], "int"), told="int-quantized"),
            Precision("int8", (1, 0)),
        ),
    ):
        assert read(config).precision_of(ATTENTION) == precision


def test_a_text_config_may_carry_it() -> None:
    quantization = read_quantization({"text_config": {"quantization_config": fp8()}}, where="x")
    assert quantization is not None
    assert quantization.precision_of(EXPERT) == FP8_BLOCKS


@pytest.mark.parametrize("told", ["bitsandbytes", "nvfp4", "quark", None])
def test_a_format_that_cannot_be_read_is_refused_by_its_name(told: str | None) -> None:
    with pytest.raises(ModelError, match=f"my model.*{told!r}.*Readable: fp8"):
        read({"quant_method": told})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (compressed(group(["Linear"], bits=4), told="nvfp4-pack-quantized"), "4-bit float.*nvfp4"),
        (compressed(group(["Linear"], "int", 3), told="pack-quantized"), "3-bit int.*pack-quant"),
        (compressed(group(["Linear"]), sparsity_config={"format": "sparse-24"}), "sparse-24"),
        (compressed(group(["Linear"]), transform_config={"R1": {}}), "transform_config.*R1"),
        (compressed(), "config_groups is missing"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "gemv"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits is 3; .* 4 and 8"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits is 8; .* 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, "lm_head"),
        (fp8(expert_dtype="fp4"), "expert_dtype"),
        (fp8(weight_block_size=[128]), "weight_block_size must be two"),
        (fp8(ignored_layers=["re:("]), r"pattern '\(' cannot be read"),
        (fp8(weight_block_sizes=[64, 64]), "Did you mean 'weight_block_size'"),
    ],
)
def test_what_would_change_the_values_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(config)


def test_all_that_is_wrong_is_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read(fp8(weight_block_size=[128], expert_dtype="fp4", rounding="up"))
    for part in ("weight_block_size", "expert_dtype", 'quantization_config.rounding="up"'):
        assert part in str(caught.value)
