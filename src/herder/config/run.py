"""What a run is: model, cluster, layout, data, training, checkpoints, observation, serving.

A path here (`train.optimizer.learning_rate`), a field, an event field and a `--set` override are
the same string.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from herder.config.quantization import (
    GroupSize,
    QuantizationName,
    WeightQuantization,
    weight_quantization,
)
from herder.config.record import RECORD, WORD, WORD_OR_RECORD, Record


class ModelConfig(Record):
    """Which model: a published or local one, or a config.json of your own."""

    source: str | None = None
    """A catalog name, folder, hub id, .gguf file or run directory."""
    config: dict[str, JsonValue] | None = None
    """The keys of a config.json, model_type included, instead of a source."""
    override: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of the source's config.json to replace, for example num_hidden_layers: 2."""
    architecture: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of the architecture to replace, whatever it came from: the paths of
    config/architecture.py. Weights stay, where they still fit: moe.num_experts_per_token: 4."""
    initialize: Literal["pretrained", "random"] = "pretrained"
    """Whether training starts from the source's weights or from seeded random ones."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.source is None) == (self.config is None):
            raise ValueError("give exactly one of source and config")
        if self.config is not None and self.initialize == "pretrained":
            raise ValueError("a config has no weights: set initialize: random")
        if self.override and self.initialize == "pretrained":
            raise ValueError("an overridden architecture has no weights: set initialize: random")
        return self


class GpuConfig(Record):
    """One device. Catalog entries are of this kind; a cluster may give its own."""

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    """cpu: a process with its share of a machine's cores and memory."""
    memory_gb: PositiveFloat
    """Nominal memory, 1e9 bytes, as it is sold: an "80 GB" device is 80e9. Plans use it."""
    physical_memory_gib: PositiveFloat | None = None
    """What the driver reports, 2**30 bytes: what a serving engine takes its share of."""
    bf16_tflops: PositiveFloat
    """Dense peak."""
    fp8_tflops: PositiveFloat | None = None
    """Dense peak; None: the device has no fp8 units."""
    fp32_tflops: PositiveFloat | None = None
    """Dense peak without TF32."""
    memory_bandwidth_gb_per_second: PositiveFloat
    intra_node_bandwidth_gb_per_second: PositiveFloat
    """To the other devices of its node, one direction."""
    fast_domain_gpus: PositiveInt | None = None
    """Devices that share the intra-node fabric where that is more than one node (NVL72 racks)."""


class ClusterConfig(Record):
    """The hardware. Absent from a run config it means this machine, detected."""

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 8
    gpu: Annotated[Annotated[str, WORD] | Annotated[GpuConfig, RECORD], WORD_OR_RECORD] = (
        "h100-80gb"
    )
    """A catalog name, or the device's own numbers. cpu: a node is a machine like this one, whose
    cores and memory its gpus_per_node ranks share."""
    inter_node_bandwidth_gb_per_second: PositiveFloat = 50.0
    """Per GPU, one direction: 50 is one 400 Gb/s port a GPU."""
    intra_node_latency_microseconds: PositiveFloat = 5.0
    inter_node_latency_microseconds: PositiveFloat = 10.0
    node_mtbf_hours: PositiveFloat = 6_300.0
    """Mean time between failures of one node. Source: Llama 3, 419 interruptions in 54 days on
    2,048 nodes, arXiv:2407.21783, section 3.3.4."""

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
ContextMethod = Literal["ring", "ulysses"]


class LayoutConfig(Record):
    """Degrees given by hand; what is absent is 1. `layout: auto` lets the planner choose."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    data_parallel_replicas: PositiveInt = 1
    """Copies of the state that ZeRO shares out: each group of data-parallel ranks / copies holds
    one, so that only gradients cross between groups (HSDP)."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    pipeline_schedule: Literal["auto"] | PipelineSchedule = "auto"
    """auto: 1f1b, or gpipe with fewer micro-batches than stages. interleaved_1f1b and zero_bubble
    give each rank two stages: less waiting, more transfers. One stage has no schedule."""
    context_method: Literal["auto"] | ContextMethod = "auto"
    """How ranks that share a sequence attend to it. ulysses: they exchange tokens for heads, of
    which each must get as many; ring: keys and values travel from rank to rank. auto: ulysses where
    it can be."""


class DataConfig(Record):
    """Where text comes from and how it becomes sequences."""

    source: str = "wikipedia-leads"
    """wikipedia-leads, or a .jsonl, .json or .txt file, or a folder of .txt files."""
    text_key: str = "text"
    """Which key of a JSON object holds the text."""
    tokenizer: str | None = None
    """A folder, a tokenizer.json, or a model that comes as a package; absent: the model's own."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of documents held out, chosen by a hash of their text."""
    max_documents: Annotated[int, Field(gt=0, lt=2**63)] | None = None


class OptimizerConfig(Record):
    """AdamW. Source: arXiv:1711.05101; defaults as Llama 3, arXiv:2407.21783, section 3.4."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    """Applied to matrices, not to norms and biases."""


class ScheduleConfig(Record):
    """The learning rate over steps: linear warm-up, then the kind's shape."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    """wsd: length of the final linear decay. Source: MiniCPM, arXiv:2404.06395, section 4."""
    minimum_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The last learning rate as a share of the peak."""

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> ScheduleConfig:
        if (self.kind == "wsd") != (self.decay_steps is not None):
            given = f"kind={self.kind!r} with decay_steps={self.decay_steps}"
            raise ValueError(f"{given}: wsd needs decay_steps, the other kinds have none")
        return self


class TrainConfig(Record):
    """One optimization."""

    steps: PositiveInt = 100
    sequence_length: PositiveInt = 512
    """Longest document piece, in tokens."""
    micro_batch_size: PositiveInt | None = None
    """Sequences of sequence_length a micro-batch; its tokens are their product. Absent: planned."""
    global_batch_tokens: PositiveInt | None = None
    """Tokens an optimizer step over all ranks. Absent: one micro-batch a data-parallel rank."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of what is computed. Parameters are kept in fp32 in either: products are in bf16 by autocast
    where ranks hold whole parameters, and by gathering them in bf16 where ZeRO shards them."""
    gradient_dtype: Literal["fp32", "bf16"] | None = None
    """In which sharded state (ZeRO 1 to 3) sums gradients over micro-batches and ranks; fp32 takes
    2 bytes a parameter more under ZeRO-1. Absent: precision. Whole state always sums in fp32."""
    seed: NonNegativeInt = 0
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    clip_norm: PositiveFloat = 1.0
    recompute: Literal["none", "full"] = "none"
    """full: every block's activations are computed again in the backward pass."""
    compile: bool = False
    """Whether blocks are compiled with torch.compile."""
    loss_chunk_tokens: PositiveInt = 512
    """Logits exist for this many tokens at once."""
    collective_timeout_seconds: PositiveFloat = 600.0
    """How long ranks wait for one that does not come before the run fails."""


class JudgeConfig(Record):
    """When a run looks broken, so that what is saved then is marked as tainted. Only the steps of
    one process are known to it: after a restart it needs minimum_steps again."""

    window_steps: PositiveInt = 100
    """A step is held against the median of the last so many good ones."""
    minimum_steps: PositiveInt = 20
    """Nothing is judged before so many steps."""
    loss_deviations: PositiveFloat | None = 10.0
    """How far above its median a loss is broken, in 1.4826 median absolute deviations or 2 % of the
    median, whichever is more. null: never."""
    gradient_deviations: PositiveFloat | None = 20.0
    """The same of the gradient norm before clipping, with 10 %."""
    routers: bool = True
    """Whether routers are broken where one sends over 90 % of the tokens to one expert, or half of
    its experts get none any more, for minimum_steps after none had for as many."""

    @model_validator(mode="after")
    def _minimum_is_seen(self) -> JudgeConfig:
        if self.minimum_steps > self.window_steps:
            given = f"minimum_steps={self.minimum_steps} with window_steps={self.window_steps}"
            raise ValueError(f"{given}: a window never holds that many")
        return self


class CheckpointConfig(Record):
    """When to save and what to keep."""

    every_steps: PositiveInt = 100
    keep_last: PositiveInt = 2
    """How many of the newest stay. Here and below only those count that are whole and not tainted.
    """
    keep_every: PositiveInt | None = None
    """Those of every so many steps stay for ever."""
    keep_best: NonNegativeInt = 0
    """So many of the lowest held-out loss stay, of those that evaluate.every_steps fell on."""
    light_every_steps: PositiveInt | None = None
    """Between full checkpoints, weights only, as what changed since the last full one of this
    process; before there is one, none. They take disk reads and a core's time, no host memory
    beyond that of `asynchronous`."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written, from a copy of what each rank writes
    in the host's memory."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)

    @model_validator(mode="after")
    def _light_ones_lie_between(self) -> CheckpointConfig:
        if self.light_every_steps is not None and self.light_every_steps >= self.every_steps:
            given = f"light_every_steps={self.light_every_steps}, every_steps={self.every_steps}"
            raise ValueError(f"{given}: light ones come between full ones, so more often")
        return self


class RestartConfig(Record):
    """What becomes of a run whose ranks are processes of one `herder train` when one is lost: it is
    killed, hangs or raises. All ranks start again, from the newest checkpoint that is whole.

    torchrun (--max-restarts) and Slurm (--requeue) start those again that they started.
    """

    max_in_a_row: NonNegativeInt = 3
    """How often, without a newer checkpoint in between. 0: never."""
    first_delay_seconds: NonNegativeFloat = 1.0
    """Before the first of these starts; doubled for each that follows, up to a minute."""
    shrinks: bool = False
    """Whether fewer ranks than the cluster has devices may go on, with the same batches: a rank
    that is lost twice in a row is left out, and a smaller world of torchrun's is accepted."""


class ObserveConfig(Record):
    """What is told, and where."""

    log_every_steps: PositiveInt = 1
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """auto: a live display on a terminal, plain lines elsewhere."""
    tensorboard: bool = True
    """Whether TensorBoard files are written, where the package is installed."""
    trace_collectives: bool = False
    """Whether every rank writes which collectives it enters, for `herder report` after a hang."""


class EvaluateConfig(Record):
    """Perplexity on the held-out documents during training."""

    every_steps: PositiveInt | None = None
    """Absent: only when `herder evaluate` is run."""
    max_tokens: PositiveInt = 65_536


class EngineConfig(Record):
    """How many requests are answered at once, and from how much memory."""

    max_num_seqs: PositiveInt = 64
    """Requests answered at once."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one forward: those of answers, then chunks of prompts. Absent: 512 on a CPU, 4,096
    on a GPU."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens of a block of the key-value cache."""
    prefix_caching: bool = True
    """Whether keys and values of a text are kept for requests that begin with the same one."""
    kv_cache_gb: PositiveFloat | None = None
    """Of keys and values. Absent: on a CPU a quarter of the free memory, at most 4 GB; on a GPU
    what 85 % of its memory leave; at least one window."""


class ServeConfig(EngineConfig):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """0: any free port, printed."""
    max_queued_requests: PositiveInt = 256
    max_model_len: PositiveInt | None = None
    """Longest prompt plus answer, in tokens. Absent: the model's window."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of weights, activations and cache. auto: bf16, but fp32 on GPUs without it."""
    quantization: QuantizationName | None = None
    """Of the layers' matrices, made as they are loaded; embedding, head and norms stay wide."""
    quantization_group_size: GroupSize | None = None
    """Inputs that share a scale. Absent: 32."""

    @property
    def weight_quantization(self) -> WeightQuantization | None:
        """What the matrices are to be kept in."""
        return weight_quantization(self.quantization, self.quantization_group_size)

    @model_validator(mode="after")
    def _groups_belong_to_quantization(self) -> ServeConfig:
        if self.quantization is None and self.quantization_group_size is not None:
            raise ValueError("quantization_group_size without quantization: give int8 or int4 too")
        return self


class RunConfig(Record):
    """A recipe, read."""

    run_directory: Annotated[str, Field(min_length=1)] = "runs/default"
    model: ModelConfig
    cluster: ClusterConfig | None = None
    layout: Annotated[
        Annotated[Literal["auto", "naive"], WORD] | Annotated[LayoutConfig, RECORD], WORD_OR_RECORD
    ] = "auto"
    """naive: nn.DataParallel over the GPUs of this machine, to be compared with."""
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    restart: RestartConfig = Field(default_factory=RestartConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
