"""What a model is: every number and every choice the forward pass depends on, and nothing else.

How many of something exists is a number here; which computation happens is code in `model/`,
chosen by an explicit field here, never by a model's name. Families fill it from published configs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from herder.config.record import Record

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "clamped_swiglu"]


class NormConfig(Record):
    """RMSNorm: x * rsqrt(mean(x^2) + eps), statistics in fp32."""

    eps: PositiveFloat
    weight_offset: Literal[0, 1] = 0
    """Added to the stored weight: 1 for Gemma, whose weights are kept around zero."""
    multiply_in_fp32: bool = False
    """Whether the weight is applied before the cast back to the activation dtype (gpt-oss, Gemma)
    or after it (Llama)."""


class DefaultScaling(Record):
    """No scaling: inv_freq_i = theta^(-2i/d). Source: RoFormer, arXiv:2104.09864, section 3.2.2."""

    kind: Literal["default"] = "default"


class LinearScaling(Record):
    """Position interpolation: inv_freq / factor. Source: arXiv:2306.15595."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicScaling(Record):
    """Dynamic NTK: theta grows with the longest position seen, past the original window."""

    kind: Literal["dynamic"] = "dynamic"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class YarnScaling(Record):
    """YaRN. Source: arXiv:2309.00071, section 3.2 (ramp) and 3.4 (attention factor)."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    """Whether the ramp's ends are rounded outwards to whole dims (gpt-oss: no)."""
    attention_factor: PositiveFloat
    """Multiplies cos and sin, so q.k gets its square. Families compute it from mscale fields."""


class Llama3Scaling(Record):
    """Llama 3.1's wavelength-dependent scaling. Source: meta-llama/llama-models, apply_scaling."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class LongRopeScaling(Record):
    """LongRoPE: one divisor a frequency, another set past the original window. arXiv:2402.13753."""

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: PositiveInt
    attention_factor: PositiveFloat


RopeScaling = Annotated[
    DefaultScaling | LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling,
    Field(discriminator="kind"),
]


class RopeConfig(Record):
    """One rotary table. A model has one, or several that its layers choose from."""

    theta: PositiveFloat
    rotary_dim: PositiveInt
    """How many dims of each head rotate, the first ones; less than head_dim for partial rotary."""
    interleaved: bool = False
    """Whether neighbours (2i, 2i+1) form a pair, or the halves (i, i + d/2)."""
    scaling: RopeScaling = DefaultScaling()
    sections: tuple[int, ...] | None = None
    """M-RoPE: how many frequencies take the time, height and width position."""

    @model_validator(mode="after")
    def _rotates_pairs(self) -> RopeConfig:
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even: RoPE rotates pairs")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.scaling, name, None)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"{name} has {len(factors)} entries, rotary_dim={self.rotary_dim} "
                    f"needs {self.rotary_dim // 2}"
                )
        return self


class QueryTemperature(Record):
    """q *= 1 + scale * ln(1 + floor((position + position_offset) / floor_tokens))."""

    scale: PositiveFloat
    floor_tokens: PositiveInt
    position_offset: Literal[0, 1]
    """1 for Llama 4, 0 for Ministral 3."""


class GroupedQueryAttention(Record):
    """Multi-head attention whose query heads share key-value heads. Source: arXiv:2305.13245."""

    kind: Literal["grouped_query"] = "grouped_query"
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "projection", "weightless"] = "none"
    """head: RMSNorm of each head before rope (Qwen3). projection: over the whole projection before
    the head split (OLMoE). weightless: of each head, after rope, on rotated layers (Llama 4)."""
    scale: PositiveFloat
    """Multiplies q.k; head_dim**-0.5 unless the family says otherwise."""
    sinks: bool = False
    """Whether each head has one learned logit in the softmax that attends to nothing (gpt-oss)."""
    clip_qkv: PositiveFloat | None = None
    logit_softcap: PositiveFloat | None = None
    """logits = cap * tanh(logits / cap), before the mask (Gemma 2)."""
    temperature: QueryTemperature | None = None

    @model_validator(mode="after")
    def _groups_are_whole(self) -> GroupedQueryAttention:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        return self


class LatentAttention(Record):
    """Multi-head latent attention. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    kind: Literal["latent"] = "latent"
    num_attention_heads: PositiveInt
    q_lora_rank: PositiveInt | None
    """None: queries are projected directly, without a latent."""
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    bias: bool = False
    """Whether the down projections and the output projection have biases."""
    latent_norm_eps: PositiveFloat = 1e-6
    scale: PositiveFloat
    """(nope + rope)**-0.5, times the square of YaRN's mscale where mscale_all_dim is set."""


Attention = Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]


class MlpConfig(Record):
    """The gated feed-forward of dense layers: down(act(gate(x)) * up(x))."""

    intermediate_size: PositiveInt
    activation: Activation = "silu"
    bias: bool = False


class NoiseConfig(Record):
    """Normal noise on router logits in training: std * max(0, 1 - step / decay_steps)."""

    std: PositiveFloat
    decay_steps: PositiveInt


class MoeConfig(Record):
    """Routed experts of the sparse layers."""

    num_experts: PositiveInt
    num_experts_per_token: PositiveInt
    expert_intermediate_size: PositiveInt
    shared_expert_intermediate_size: PositiveInt | None = None
    shared_expert_gate: bool = False
    """Whether the shared expert's output is scaled by sigmoid(w.x) (Qwen2-MoE)."""
    scoring: Literal["softmax", "sigmoid"]
    """Over all experts. (gpt-oss' softmax over the chosen ones is softmax, normalized.)"""
    normalize_weights: bool
    """Whether the chosen scores are divided by their sum."""
    choose_by_logits: bool = False
    num_groups: PositiveInt = 1
    num_groups_per_token: PositiveInt = 1
    """How many groups a token may choose from; the rest is masked."""
    group_score: Literal["max", "top2_sum"] = "max"
    correction_bias: bool = False
    """Whether a bias, updated outside the gradient, is added to scores for the choice only."""
    correction_bias_update_rate: float = 0.0
    """DeepSeek-V3's gamma: how far a bias moves each step towards balance; 0 keeps it fixed."""
    routed_scaling_factor: float = 1.0
    weight_on_input: bool = False
    """Whether the score scales the expert's input (Llama 4) instead of its output."""
    router_bias: bool = False
    expert_bias: bool = False
    activation: Activation = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    """For activation clamped_swiglu only. Source: gpt-oss model card, arXiv:2508.10925."""
    aux_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    noise: NoiseConfig | None = None
    capacity_factor: PositiveFloat | None = None
    """In training an expert takes at most ceil(this * tokens * num_experts_per_token / num_experts)
    choices of a micro-batch; those of later tokens are dropped. None: all it gets."""

    @model_validator(mode="after")
    def _choice_is_possible(self) -> MoeConfig:
        k, experts, groups = self.num_experts_per_token, self.num_experts, self.num_groups
        if k > experts:
            raise ValueError(f"num_experts_per_token={k} exceeds num_experts={experts}")
        if experts % groups:
            raise ValueError(f"num_groups={groups} does not divide num_experts={experts}")
        if self.num_groups_per_token > groups:
            raise ValueError(
                f"num_groups_per_token={self.num_groups_per_token} exceeds num_groups={groups}"
            )
        if k > experts // groups * self.num_groups_per_token:
            raise ValueError(
                f"num_experts_per_token={k} exceeds the "
                f"{experts // groups * self.num_groups_per_token} experts left by the group limit"
            )
        return self


class LayerSpec(Record):
    """What one layer does differently from the others."""

    attention: Literal["full", "sliding", "chunked"] = "full"
    window: PositiveInt | None = None
    """sliding: how many keys a query sees, itself included. chunked: the chunk's length."""
    rope: int | None = 0
    """Index into ArchitectureConfig.ropes; None: this layer does not rotate (NoPE)."""
    temperature: bool = False
    """Whether attention.temperature applies here."""
    feed_forward: Literal["dense", "routed"] = "dense"
    cross_attention: bool = False
    """Whether this layer attends to image tokens instead of text (Llama 3.2 Vision)."""

    @model_validator(mode="after")
    def _window_fits_kind(self) -> LayerSpec:
        if (self.attention == "full") != (self.window is None):
            raise ValueError(f"attention={self.attention!r} with window={self.window}")
        return self


class VisionConfig(Record):
    """An image encoder and how its output joins the text."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    patch_size: PositiveInt
    temporal_patch_size: PositiveInt = 1
    num_channels: PositiveInt = 3
    image_size: PositiveInt | None = None
    """None: native resolution."""
    norm: Literal["layer_norm", "rms_norm"]
    norm_eps: PositiveFloat
    activation: Activation
    gated_mlp: bool = False
    window_size: PositiveInt | None = None
    full_attention_layers: tuple[int, ...] | None = None
    merge_size: PositiveInt = 1
    fusion: Literal["joined_tokens", "cross_attention"]


class ArchitectureConfig(Record):
    """One decoder, complete. Two equal records compute the same function of equal weights."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    max_position_embeddings: PositiveInt
    norm: NormConfig
    tie_embeddings: bool
    attention: Attention
    ropes: tuple[RopeConfig, ...]
    mlp: MlpConfig | None
    """None when every layer is routed."""
    moe: MoeConfig | None = None
    layers: tuple[LayerSpec, ...]
    branch_norm: bool = False
    """Whether attention and feed-forward outputs are normed too before they are added (Gemma 2)."""
    embedding_scale: PositiveFloat = 1.0
    final_logit_softcap: PositiveFloat | None = None
    initializer_range: PositiveFloat = 0.02
    vision: VisionConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @model_validator(mode="after")
    def _layers_find_their_parts(self) -> ArchitectureConfig:
        if not self.layers:
            raise ValueError("layers is empty")
        for index, layer in enumerate(self.layers):
            if layer.rope is not None and not 0 <= layer.rope < len(self.ropes):
                raise ValueError(f"layer {index}: rope={layer.rope}, but {len(self.ropes)} exist")
            if layer.feed_forward == "dense" and self.mlp is None:
                raise ValueError(f"layer {index} is dense, but mlp is null")
            if layer.feed_forward == "routed" and self.moe is None:
                raise ValueError(f"layer {index} is routed, but moe is null")
            if layer.temperature and getattr(self.attention, "temperature", None) is None:
                raise ValueError(f"layer {index} uses a temperature, but attention has none")
        return self
