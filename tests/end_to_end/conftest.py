"""A recipe that trains on several ranks of this machine, for as long as it is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tokenizer_json: str) -> Path:
    """Of a model that trains on two ranks of this machine, for longer than anybody waits."""
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(small_tokenizer_json)
    documents = [" and ".join(["a sheep"] * (n % 7 + 1)) + f" at gate {n}" for n in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    written = {
        "run_directory": str(tmp_path / "run"),
        "model": {
            "initialize": "random",
            "config": {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 400,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
            },
        },
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "layout": {"zero_stage": 0},
        "data": {
            "source": str(tmp_path / "text.txt"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
        },
        "train": {"steps": 10**6, "sequence_length": 64, "precision": "fp32"},
        "checkpoint": {"every_steps": 10**6},
        "restart": {"first_delay_seconds": 0},
        "observe": {"tensorboard": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written))
    return path
