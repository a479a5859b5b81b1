"""Which layouts exist: degrees that divide the model and the cluster, and why the others do not.

Owns legality and its reasons, and the names of shapes; cost and memory are priced elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import PositiveInt

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LatentAttention
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, ContextMethod
from herder.errors import PlanError

ZeroStage = Literal[0, 1, 2, 3]
MAX_DATA_PARALLEL_RANKS = 512
"""Largest group that gradients are reduced over and parameters gathered from in one collective.

Why a cap: a ring's latency grows with its ranks while each rank's share of a layer shrinks. To
gather one layer of a 405B model over 16,384 ranks takes 0.16 s in hops of 10 us alone, its forward
products of 8,192 tokens 0.09 s (at 60 % of an H100's peak): links decide, whatever their width.
At 512 ranks the hops take 5 ms. The global batch must also hold a sequence for each rank, and each
group fails as one. Llama 3 405B trained on 16,384 GPUs in groups of 128, arXiv:2407.21783, table 4;
ZeRO's authors measured up to 400 GPUs, arXiv:1910.02054, section 10."""

DistributionShape = Literal[
    "single-GPU dense",
    "single-GPU MoE",
    "DP dense",
    "DP MoE",
    "PP dense",
    "PP MoE",
    "TP dense",
    "TP MoE",
    "DP attention + EP MoE",
    "MLA + MoE",
]


def distribution_shape(
    architecture: ArchitectureConfig, *, tp: int, pp: int, ep: int, dp: int = 1
) -> DistributionShape:
    """The name of how such a model is spread over devices by these degrees.

    dp: ranks that train one model on tokens of their own; replicas that serve are not counted.
    """
    is_moe = architecture.moe is not None
    if is_moe and max(tp, pp, ep) > 1:
        if isinstance(architecture.attention, LatentAttention):
            return "MLA + MoE"
        if ep > 1:
            return "DP attention + EP MoE"
    if tp > 1:
        return "TP MoE" if is_moe else "TP dense"
    if pp > 1:
        return "PP MoE" if is_moe else "PP dense"
    if dp > 1:
        return "DP MoE" if is_moe else "DP dense"
    return "single-GPU MoE" if is_moe else "single-GPU dense"


class Layout(Record):
    """How many ways each dimension of the work is split."""

    tensor_parallel_size: PositiveInt
    pipeline_parallel_size: PositiveInt
    data_parallel_size: PositiveInt
    context_parallel_size: PositiveInt
    expert_parallel_size: PositiveInt
    data_parallel_replicas: PositiveInt = 1
    """Copies of the state that ZeRO shares out, data_parallel_size / copies ranks holding each."""
    zero_stage: ZeroStage
    """What the data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too.
    Source: ZeRO, arXiv:1910.02054, section 5."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.num_data_ranks

    @property
    def num_data_ranks(self) -> int:
        """Ranks that hold the same parameters before ZeRO: data times context parallelism."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def num_shards(self) -> int:
        """Ranks that ZeRO shares one copy of the state out to."""
        return self.num_data_ranks // self.data_parallel_replicas

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axis sizes from the slowest links to the fastest. dp replicates, fsdp shards."""
        copies = self.data_parallel_replicas if self.zero_stage > 0 else self.data_parallel_size
        return {
            "pp": self.pipeline_parallel_size,
            "dp": copies,
            "fsdp": self.data_parallel_size // copies,
            "cp": self.context_parallel_size,
            "ep": self.expert_parallel_size,
            "tp": self.tensor_parallel_size,
        }

    def shape(self, architecture: ArchitectureConfig) -> DistributionShape:
        """The name of how it spreads such a model."""
        return distribution_shape(
            architecture,
            tp=self.tensor_parallel_size,
            pp=self.pipeline_parallel_size,
            ep=self.expert_parallel_size,
            dp=self.num_data_ranks,
        )

    def told(self) -> str:
        """The degrees above 1 and the ZeRO stage, as people write them."""
        if self.num_ranks == 1:
            return "one rank"
        degrees = {
            "TP": self.tensor_parallel_size,
            "PP": self.pipeline_parallel_size,
            "CP": self.context_parallel_size,
            "EP": self.expert_parallel_size,
            "DP": self.data_parallel_size,
        }
        words = [f"{name} {degree:,}" for name, degree in degrees.items() if degree > 1]
        copies = self.data_parallel_replicas
        told = f" in {copies:,} copies" if copies > 1 else ""
        return ", ".join([*words, f"ZeRO-{self.zero_stage}{told}"])


def make_layout(
    *, tp: int, pp: int, dp: int, cp: int, ep: int, zero_stage: ZeroStage, copies: int = 1
) -> Layout:
    """A Layout from short names."""
    return Layout(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        context_parallel_size=cp,
        expert_parallel_size=ep,
        data_parallel_replicas=copies,
        zero_stage=zero_stage,
    )


def context_method(
    architecture: ArchitectureConfig, layout: Layout, asked: Literal["auto"] | ContextMethod
) -> ContextMethod:
    """How ranks that share a sequence attend. auto: by an exchange of tokens for heads, which moves
    least, where every rank gets as many. Raises PlanError where that is asked for and cannot be.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509, section 3.2.
    """
    attention, cp = architecture.attention, layout.context_parallel_size
    heads = attention.num_attention_heads // layout.tensor_parallel_size
    kv_heads = heads
    if isinstance(attention, GroupedQueryAttention):
        kv_heads = max(1, attention.num_key_value_heads // layout.tensor_parallel_size)
    divides = heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)
    if asked == "ulysses" and not divides:
        raise PlanError(
            f"layout: context_method=ulysses gives each of context_parallel_size={cp} ranks as "
            f"many heads, and a rank has {heads} with {kv_heads} of keys and values. Set "
            "context_method: ring, or auto."
        )
    if asked == "auto":
        return "ulysses" if divides else "ring"
    return asked


def sequence_multiple(layout: Layout) -> int:
    """Tokens of a sequence are a multiple of this: tensor parallelism splits the residual stream,
    context parallelism gives each rank a part of the first half and one of the second."""
    cp = layout.context_parallel_size
    return layout.tensor_parallel_size * (2 * cp if cp > 1 else 1)


def fast_domain_size(cluster: ClusterConfig) -> int:
    """Devices that tensor parallelism may span: a node, or a rack whose fabric is one (NVL72)."""
    domain = cluster_gpu(cluster).fast_domain_gpus
    return max(cluster.gpus_per_node, min(domain or 1, cluster.num_gpus))


def tensor_degree_problem(
    architecture: ArchitectureConfig, degree: int, *, copies_kv_heads: bool
) -> str | None:
    """Why the model cannot be split this many ways, or None.

    Training may copy key-value heads when there are fewer of them than ranks; serving may not.
    """
    attention, mlp, moe = architecture.attention, architecture.mlp, architecture.moe
    sizes: dict[str, int | None] = {"num_attention_heads": attention.num_attention_heads}
    if isinstance(attention, GroupedQueryAttention):
        heads = attention.num_key_value_heads
        if degree > heads and attention.qk_norm == "projection":
            return f"exceeds num_key_value_heads={heads}, which are normed as one and not copied"
        sizes["num_key_value_heads"] = None if copies_kv_heads and degree % heads == 0 else heads
    sizes["vocab_size"] = architecture.vocab_size
    if mlp is not None:
        sizes["mlp.intermediate_size"] = mlp.intermediate_size
    if moe is not None:
        sizes["moe.expert_intermediate_size"] = moe.expert_intermediate_size
        sizes["moe.shared_expert_intermediate_size"] = moe.shared_expert_intermediate_size
    uneven = (f"{name}={size}" for name, size in sizes.items() if size and size % degree)
    first = next(uneven, None)
    return f"does not divide {first}" if first else None


def legal_tensor_degrees(
    architecture: ArchitectureConfig, cluster: ClusterConfig, *, copies_kv_heads: bool = True
) -> tuple[int, ...]:
    """Ascending degrees that divide the model, the fast domain and the cluster."""
    return tuple(
        degree
        for degree in divisors(fast_domain_size(cluster))
        if cluster.num_gpus % degree == 0
        and tensor_degree_problem(architecture, degree, copies_kv_heads=copies_kv_heads) is None
    )


def legal_expert_degrees(architecture: ArchitectureConfig, num_ranks: int) -> tuple[int, ...]:
    """Ascending degrees that divide the experts and the ranks of a copy; (1,) when dense."""
    experts = architecture.moe.num_experts if architecture.moe else 1
    return tuple(degree for degree in divisors(num_ranks) if experts % degree == 0)


MAX_CLUSTERS_TRIED = 400
"""Node counts looked at for a cluster that would do, upwards from what the weights alone need."""
USUAL_NODE_SIZES = (1, 2, 4, 8)


def growing_clusters(cluster: ClusterConfig, least_devices: float) -> Iterator[ClusterConfig]:
    """Clusters of the same device, smallest first: parts of a node, then whole nodes.

    A node holds as many devices as the cluster's, or eight where GPUs are asked for by the piece.
    """
    is_gpu = cluster_gpu(cluster).kind == "gpu"
    per_node = max(cluster.gpus_per_node, USUAL_NODE_SIZES[-1] if is_gpu else 1)
    for count in USUAL_NODE_SIZES:
        if least_devices <= count < per_node:
            yield cluster.model_copy(update={"nodes": 1, "gpus_per_node": count})
    first = max(1, -(-int(least_devices) // per_node))
    for nodes in range(first, first + MAX_CLUSTERS_TRIED):
        yield cluster.model_copy(update={"nodes": nodes, "gpus_per_node": per_node})


def smallest_cluster(
    cluster: ClusterConfig, least_devices: float, would_do: Callable[[ClusterConfig], bool]
) -> str:
    """A sentence for errors: the flags of the first growing cluster that would do, or empty."""
    found = next(filter(would_do, growing_clusters(cluster, least_devices)), None)
    if found is None:
        return ""
    device = cluster_gpu(found).name.split()[0]
    flags = f"--nodes {found.nodes} --gpus-per-node {found.gpus_per_node} --gpu {device}"
    return f"Smallest cluster that would do: {flags}."


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
