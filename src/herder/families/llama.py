"""Llama 2, 3, 3.1, 3.2 (text) and models of their shape such as SmolLM2.

Biases, where there are any, are on q, k, v and o alike; so are those of the feed-forward.
"""

from __future__ import annotations

from functools import partial

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, names
from herder.families.family import Family
from herder.families.reading import ConfigReader

HF_CLASS = keys.HfClass(max_position_embeddings=2048, attention_bias=False, mlp_bias=False)
"""Source: transformers 5.24, LlamaConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a LlamaForCausalLM."""
    # pretraining_tp split a matmul and never changed its result; the other two are SmolLM2's.
    reader.ignore("pretraining_tp", "is_llama_config")
    reader.neutral("rope_interleaved", False)
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden_size % num_heads and not reader.problems:
        reader.problem(
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}; "
            "Llama requires it even where head_dim is given"
        )
    return keys.read(reader, HF_CLASS)


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        read=read,
        to_hf=partial(keys.write, hf_class=HF_CLASS),
        weight_rules=names.decoder_rules,
        tiny={**keys.TINY, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6},
    ),
)
