"""What weights take when they are served: all in one dtype, or as a published model stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from herder.config.quantization import WORD_BITS, WeightQuantization
from herder.errors import ConfigError, ModelError
from herder.families.quantization import Precision, read_quantization
from herder.families.weights import EXPERT, LAYER, WeightRules
from herder.plan.parameters import Module, Weight

CacheDtype = Literal["bf16", "fp8"]
CACHE_BYTES: dict[CacheDtype, int] = {"bf16": 2, "fp8": 1}
_SCALE_BYTES: dict[str, float] = {"mxfp4": 1, "fp8": 4}
_OTHER_SCALE_BYTES = 2
_ROUTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bytes of a parameter, by what it belongs to."""

    name: str
    other_bytes: float
    """Of what `matrix_bytes` does not list, and of everything that is no matrix."""
    matrix_bytes: Mapping[Module, float] = field(default_factory=dict)
    quantization: WeightQuantization | None = None
    """Of layers' matrices, made when the model is loaded; then these are counted as they lie."""

    def bytes_of(self, weight: Weight) -> float:
        """Of one parameter of it."""
        if self.quantization is not None:
            return self._bytes_as_loaded(weight, self.quantization)
        listed = self.matrix_bytes if len(weight.shape) == 2 else {}
        return listed.get(weight.module, self.other_bytes)

    def _bytes_as_loaded(self, weight: Weight, how: WeightQuantization) -> float:
        if weight.module == "router":
            return _ROUTER_BYTES
        if len(weight.shape) != 2 or weight.stays_wide or weight.module in ("embedding", "head"):
            return self.other_bytes
        num_inputs = weight.shape[1]
        return how.row_words(num_inputs) * WORD_BITS / 8 / num_inputs


BF16 = WeightFormat("bf16", 2)
FP8 = WeightFormat("fp8", 1)


def quantized_format(how: WeightQuantization) -> WeightFormat:
    """Of a model that is quantized as it is loaded, all else in bf16 but for routers in fp32."""
    return WeightFormat(how.name, 2, quantization=how)


def published_format(
    config_json: Mapping[str, Any], rules: WeightRules, *, where: str
) -> WeightFormat | None:
    """How a published model stores its matrices; None where that is plain.

    The first layer of each kind of module stands for all, as every published model has it. A format
    that cannot be read is refused when it is loaded, not here: a plan has others to offer.
    """
    try:
        quantization = read_quantization(config_json, where=where)
    except (ConfigError, ModelError):
        return None
    if quantization is None:
        return None
    found: dict[Module, Precision] = {}
    for rule in rules.rules:
        layer = str(rule.layers[0] if rule.layers else 0)
        hub = rule.hub.replace(LAYER, layer).replace(EXPERT, "0").removesuffix(".weight")
        precision = quantization.precision_of(hub)
        module = _module_of(rule.ours)
        if precision is not None and module is not None:
            found.setdefault(module, precision)
    if not found:
        return None
    name = "+".join(sorted({_name(each) for each in found.values()}))
    return WeightFormat(name, 2, {module: _bytes(each) for module, each in found.items()})


def _module_of(ours: str) -> Module | None:
    """Which kind of module a matrix of ours belongs to; None for those that stay plain."""
    if not ours.endswith(".weight"):
        return None
    modules: dict[str, Module] = {
        ".attention.": "attention",
        ".experts.": "experts",
        ".shared.": "shared_expert",
        ".feed_forward.": "feed_forward",
    }
    return next((module for part, module in modules.items() if part in ours), None)


def _name(precision: Precision) -> str:
    whole = precision.storage in ("fp8", "int8", "mxfp4")
    return precision.storage if whole else f"{precision.storage}-int{precision.bits}"


def _bytes(precision: Precision) -> float:
    """Of a value with its share of scale and zero point."""
    outputs, inputs = precision.block
    scale = _SCALE_BYTES.get(precision.storage, _OTHER_SCALE_BYTES)
    if not precision.symmetric:
        scale += precision.bits / 8
    is_shared = outputs and inputs
    return precision.bits / 8 + (scale / (outputs * inputs) if is_shared else 0)
