"""How a published model's weights are quantized: its quantization_config as each layer's precision.

Owns the formats' keys, and which module a name in them means. Knows no tensor and no file. Nothing
is inherited: a module has the precision of the group that names it, or none. Sources:
deepseek-ai/DeepSeek-V3 README_WEIGHTS (fp8 blocks), github.com/vllm-project/compressed-tensors,
AutoGPTQ and AutoAWQ, the Open Compute Project's MX specification 1.0 (mxfp4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from herder.errors import ModelError
from herder.families.reading import QUANTIZATION, ConfigReader

Storage = Literal["fp8", "int8", "packed", "gptq", "awq", "mxfp4"]
_LINEAR = "Linear"
_KEPT = re.compile(r"(.*\.)?(gate|router|shared_expert_gate|embed_tokens|lm_head|\w*norm)")
"""Modules that no format quantizes, whatever its targets say: router, norms, embedding, head."""
_PREFIX = re.compile(r"((model|language_model|text_model)\.)*")
_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")
"""What different tools put before the same module's name."""
_NAME_OR_GLOB = re.compile(r"[\w.*-]+")
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore")
_HOW_IT_WAS_MADE = (
    "fmt scale_fmt quantization_status global_compression_ratio zero_point sym damp_percent "
    "desc_act static_groups true_sequential act_group_aware meta quantizer dataset tokenizer "
    "batch_size max_input_length model_seqlen cache_block_outputs pad_token_id "
    "model_name_or_path model_file_base_name modules_in_block_to_quantize block_name_to_quantize "
    "module_name_preceding_first_block"
)
_HOW_IT_WOULD_RUN = (
    "activation_scheme activation_scale_ub kv_cache_scheme dequantize use_optimized_inference "
    "backend use_cuda_fp16 use_exllama disable_exllama exllama_config do_fuse modules_to_fuse "
    "fuse_max_seq_len"
)
_OF_WEIGHTS = "actorder observer observer_kwargs dynamic scale_dtype zp_dtype is_mse"
"""Keys on which the stored values do not depend."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How one module's matrix is stored; a matrix without one is stored as plain numbers."""

    storage: Storage
    block: tuple[int, int]
    """Outputs x inputs that share a scale; 0 means all of them."""
    bits: int = 8
    symmetric: bool = True
    """Whether there are no zero points."""
    zero_offset: int = 0
    """Added to stored zero points: 1 in GPTQ's first version."""


class Modules:
    """The modules that a list of names, globs and expressions (`re:`) stands for.

    Tools name one module `model.layers.0...` or `language_model.model.layers.0...`: what stands
    before is not compared. A name stands for a run of whole parts: mlp.gate is not mlp.gate_proj.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if not _NAME_OR_GLOB.fullmatch(pattern):
                self._expressions.append(re.compile(pattern.removeprefix("re:")))
            elif "*" in pattern:
                glob = re.escape(_bare(pattern)).replace(r"\*", r"[^.]*")
                self._expressions.append(re.compile(rf"(.*\.)?{glob}(\..*)?$"))
            else:
                self._names.add(_bare(pattern))

    def __contains__(self, module: str) -> bool:
        bare = _bare(module)
        parts = bare.split(".")
        runs = combinations(range(len(parts) + 1), 2)
        if any(".".join(parts[start:end]) in self._names for start, end in runs):
            return True
        called = {module, *(prefix + bare for prefix in _PREFIXES)}
        return any(each.match(name) for each in self._expressions for name in called)


def _bare(name: str) -> str:
    return _PREFIX.sub("", name, count=1)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which modules of a model are quantized, and how."""

    groups: tuple[tuple[Modules | None, Precision], ...]
    """Those that come first win. None: every module."""
    ignored: Modules

    def precision_of(self, module: str) -> Precision | None:
        """The precision of a module by its name in the files; None: plain numbers."""
        if _KEPT.fullmatch(module) or module in self.ignored:
            return None
        return next((how for where, how in self.groups if where is None or module in where), None)


def read_quantization(config: Mapping[str, Any], *, where: str) -> Quantization | None:
    """The quantization that a config.json declares, its text_config included; None without one.

    Raises ModelError with the format's name where it is not supported, ConfigError that lists
    every key that is wrong or unknown.
    """
    given = config.get(QUANTIZATION) or (config.get("text_config") or {}).get(QUANTIZATION)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method not in _METHODS:
        raise ModelError(
            f"{where}: the weights are quantized in a format that cannot be read, {method!r}. "
            f"Readable: {', '.join(_METHODS)}. Take the model's unquantized weights, or a GGUF "
            "file of it."
        )
    reader = ConfigReader(given, where=where, path=f"{QUANTIZATION}.")
    reader.ignore("quant_method", *_HOW_IT_WAS_MADE.split(), *_HOW_IT_WOULD_RUN.split())
    named = [name for key in _IGNORED for name in reader.optional_texts(key) or ()]
    targets = [(name, how) for names, how in _METHODS[method](reader) for name in names]
    # In compressed-tensors a name beats an expression and an expression beats a class.
    targets.sort(key=lambda entry: (entry[0] == _LINEAR, entry[0].startswith("re:")))
    groups = tuple(
        (None if name == _LINEAR else _modules(reader, [name]), how) for name, how in targets
    )
    quantization = Quantization(groups, _modules(reader, named))
    reader.finish()
    return quantization


def _modules(reader: ConfigReader, patterns: list[str]) -> Modules:
    try:
        return Modules(patterns)
    except re.error as error:
        reader.problem(f"{QUANTIZATION}: the pattern {error.pattern!r} cannot be read: {error}")
        return Modules(())


_Groups = list[tuple[list[str], Precision]]


def _read_fp8(reader: ConfigReader) -> _Groups:
    reader.neutral("expert_dtype", "fp8")
    reader.neutral("modules_to_convert", None, [])
    block = _pair(reader, "weight_block_size") if reader.has("weight_block_size") else (0, 0)
    reader.ignore("weight_block_size")
    return [([_LINEAR], Precision("fp8", block))]


def _read_fbgemm(_: ConfigReader) -> _Groups:
    return [([_LINEAR], Precision("fp8", (1, 0)))]


def _read_mxfp4(_: ConfigReader) -> _Groups:
    return [([_LINEAR], Precision("mxfp4", (1, 32), bits=4))]


def _read_gptq(reader: ConfigReader) -> _Groups:
    reader.neutral("dynamic", None, {})
    reader.neutral("lm_head", None, False)
    reader.neutral("is_marlin_format", None, False)
    reader.ignore("format", "version")
    offset = reader.choice("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, "gptq")
    bits, block = _packed_bits(reader, "bits", 4, 8), (1, _group_size(reader, "group_size"))
    return [([_LINEAR], Precision("gptq", block, bits, symmetric=False, zero_offset=offset))]


def _read_awq(reader: ConfigReader) -> _Groups:
    reader.choice("version", {"gemm": None, "GEMM": None}, "gemm")
    bits_key, group_key = ("bits", "group_size")
    if reader.has("w_bit"):
        bits_key, group_key = ("w_bit", "q_group_size")
    bits, block = _packed_bits(reader, bits_key, 4), (1, _group_size(reader, group_key))
    return [([_LINEAR], Precision("awq", block, bits, symmetric=False))]


def _packed_bits(reader: ConfigReader, key: str, *readable: int) -> int:
    bits = reader.integer(key)
    if bits not in readable:
        told = " and ".join(map(str, readable))
        reader.problem(f"{QUANTIZATION}.{key} is {bits}; what can be read is {told}")
    return bits


def _group_size(reader: ConfigReader, key: str) -> int:
    """Inputs that share a scale; -1 stands for all of them."""
    return max(0, reader.integer(key, minimum=-1))


def _read_compressed(reader: ConfigReader) -> _Groups:
    reader.neutral("transform_config", None, {})
    reader.ignore("version")
    sparsity = reader.optional_section("sparsity_config")
    if sparsity is not None:
        sparsity.neutral("format", "dense")
        sparsity.ignore("targets", "ignore", "global_sparsity", "sparsity_structure")
    of_all = reader.optional_text("format")
    sections = reader.sections("config_groups")
    if not sections:
        reader.problem(f"{QUANTIZATION}.config_groups is missing, empty or no object of objects")
    groups: _Groups = []
    for group in sections:
        group.ignore("input_activations", "output_activations")
        targets, own = group.optional_texts("targets") or [], group.optional_text("format")
        weights = group.optional_section("weights")
        if weights is not None:
            groups.append((targets, _read_weights(weights, own or of_all)))
    return groups


def _read_weights(weights: ConfigReader, told: str | None) -> Precision:
    """The weights of one of compressed-tensors' groups, whose format is `told`."""
    weights.ignore(*_OF_WEIGHTS.split())
    kind = weights.choice("type", {"int": "int", "float": "float"}, "int")
    bits = weights.integer("num_bits", 8)
    symmetric = weights.boolean("symmetric", True)
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": None, "block": None}
    block = weights.choice("strategy", blocks, "tensor")
    group_size = weights.optional_integer("group_size")
    if block is None:
        pair = group_size is None
        block = _pair(weights, "block_structure") if pair else (1, group_size)
    weights.ignore("block_structure")
    storages: dict[tuple[str, str | None, int], Storage] = {
        ("float", "float-quantized", 8): "fp8",
        ("float", "naive-quantized", 8): "fp8",
        ("int", "int-quantized", 8): "int8",
        ("int", "naive-quantized", 8): "int8",
        ("int", "pack-quantized", 4): "packed",
        ("int", "pack-quantized", 8): "packed",
    }
    storage = storages.get((kind, told, bits))
    if storage is None:
        weights.problem(
            f"{QUANTIZATION}: {bits}-bit {kind} weights in format {told} cannot be read. Readable: "
            + "; ".join(f"{bits}-bit {kind} {told}" for kind, told, bits in storages)
        )
    return Precision(storage or "fp8", block, bits, symmetric)


def _pair(reader: ConfigReader, key: str) -> tuple[int, int]:
    sizes = reader.numbers(key)
    if len(sizes) != 2 or any(size != int(size) for size in sizes):
        reader.problem(f"{QUANTIZATION}: {key} must be two whole numbers")
        return (1, 1)
    return (int(sizes[0]), int(sizes[1]))


_METHODS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": _read_mxfp4,
}
