"""Adding a family that combines known parts touches one file: this test adds one.

GLM-4-MoE is not a family of this project. Its attention is Qwen 3's with part of a head rotated,
its experts are DeepSeek-V3's behind grouped queries; the file below says so, and nothing else does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import herder.families
from herder.checkpoint.huggingface import load_decoder, save_huggingface
from herder.checkpoint.source import resolve_model
from herder.errors import ModelError
from herder.evaluate.parity import compare
from herder.evaluate.transformers_reference import made_by_transformers
from herder.families.registry import families, family_of
from herder.plan.parameters import parameter_count

FILE = '''
"""GLM-4-MoE."""

from herder.families import keys, layer_types, names
from herder.families.family import Family

HF_CLASS = keys.HfClass(
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    num_key_value_heads=8,
    expert_width="moe_intermediate_size",
    expert_counts=("n_routed_experts",),
    norm_topk_prob=True,
)


def read(reader):
    reader.ignore("num_nextn_predict_layers")
    num_layers = reader.integer("num_hidden_layers")
    first = reader.integer("first_k_dense_replace", 1, minimum=0)
    width = reader.integer("moe_intermediate_size") * reader.integer("n_shared_experts")
    moe = {
        "shared_expert_intermediate_size": width,
        "scoring": "sigmoid",
        "correction_bias": True,
        "group_score": "top2_sum",
        "num_groups": reader.integer("n_group", 1),
        "num_groups_per_token": reader.integer("topk_group", 1),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }
    attention = {
        "qkv_bias": reader.boolean("attention_bias", False),
        "qk_norm": "head" if reader.boolean("use_qk_norm", False) else "none",
    }
    routed, rope = range(first, num_layers), {"rotates_part": True}
    return keys.read(reader, HF_CLASS, routed=routed, attention=attention, rope=rope, moe=moe)


def to_hf(architecture):
    attention, moe = keys.attention_of(architecture), keys.experts_of(architecture)
    return {
        **keys.write(architecture, HF_CLASS),
        "partial_rotary_factor": architecture.ropes[0].rotary_dim / attention.head_dim,
        "n_shared_experts": moe.shared_expert_intermediate_size // moe.expert_intermediate_size,
        "n_group": moe.num_groups,
        "topk_group": moe.num_groups_per_token,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "first_k_dense_replace": len(layer_types.layers_with(architecture, "dense")),
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm == "head",
    }


FAMILIES = (
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=names.decoder_rules,
        tiny={
            **keys.TINY,
            "hidden_size": 40,
            "intermediate_size": 72,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 28,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
)
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The family's name, once its file lies where families are looked for."""
    (tmp_path / "glm4_moe.py").write_text(FILE)
    monkeypatch.setattr(herder.families, "__path__", [*herder.families.__path__, str(tmp_path)])
    families.cache_clear()
    yield "glm4_moe"
    families.cache_clear()
    sys.modules.pop("herder.families.glm4_moe", None)


def save_random_model(config: dict[str, object], folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(made)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if name.endswith("bias"):
            nn.init.normal_(tensor, 0.0, 0.2)
    model.save_pretrained(folder)


def test_without_its_file_the_family_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="glm4_moe"):
        family_of({"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]})


def test_a_family_of_known_parts_is_read_computed_and_written_by_one_file(
    added: str, tmp_path: Path
) -> None:
    config = families()[added].tiny_config()
    save_random_model(config, tmp_path / "model")
    source = resolve_model(str(tmp_path / "model"))
    decoder = load_decoder(source)
    report = compare(decoder, made_by_transformers(source, decoder, seed=0))
    assert report.passed, report
    assert parameter_count(source.architecture) == sum(p.numel() for p in decoder.parameters())
    save_huggingface(decoder, tmp_path / "out", family=added, like=source)
    again = resolve_model(str(tmp_path / "out"))
    assert again.architecture == source.architecture
    assert compare(decoder, made_by_transformers(again, decoder, seed=1)).passed
