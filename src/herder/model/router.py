"""Which experts a token goes to, and how much each counts.

Owns the mathematics of every published router, chosen by MoeConfig's fields; knows nothing of
experts, so that whatever shards them leaves the router alone.

Legend: T tokens, D hidden, E experts, K experts a token, G groups of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.config.architecture import MoeConfig
from herder.model.routing import LayerRouting

_SMALLEST_SUM = 1e-20
"""Added to the sum of sigmoid scores that others are divided by, as DeepSeek-V3 does."""


class Router(nn.Module):
    """Scores, choice and weights, in fp32 whatever the model's dtype: bf16 changes choices.

    Sources: Mixtral, arXiv:2401.04088; Llama 4; gpt-oss, arXiv:2508.10925; group limits of
    DeepSeek-V2, arXiv:2405.04434, section 2.2.2; bias and sigmoid of V3, arXiv:2412.19437, 2.1.2.
    """

    correction_bias: Tensor | None

    def __init__(self, hidden_size: int, config: MoeConfig, *, device: str) -> None:
        super().__init__()
        self.config = config
        self.axes = (None, "embed")
        made = {"device": device, "dtype": torch.float32}
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, **made))
        bias = nn.Parameter(torch.empty(config.num_experts, **made))
        self.register_parameter("bias", bias if config.router_bias else None)
        correction = torch.zeros(config.num_experts, **made) if config.correction_bias else None
        self.register_buffer("correction_bias", correction)

    def forward(self, x_TD: Tensor, routing: LayerRouting | None) -> tuple[Tensor, Tensor]:
        """(chosen_TK int64, weight_TK fp32); chosen is E, which is no expert, for padding
        and for choices that an expert has no room for."""
        with torch.autocast(x_TD.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            logits_TE = F.linear(x_TD.float(), self.weight.float(), bias)
        noise_TE = None if routing is None else routing.noise_TE(self.config.num_experts)
        if noise_TE is not None:
            logits_TE = logits_TE + noise_TE
        is_softmax = self.config.scoring == "softmax"
        score_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
        chosen_TK = self._choose(logits_TE.detach(), score_TE.detach())
        weight_TK = self._weigh(score_TE.gather(1, chosen_TK))
        if routing is not None:
            if routing.real_T is not None:
                real_T1 = routing.real_T[:, None]
                chosen_TK = chosen_TK.where(real_T1, self.config.num_experts)
                weight_TK = weight_TK.where(real_T1, 0.0)
            routing.record(logits_TE, chosen_TK)
            dropped_TK = routing.dropped_TK(chosen_TK, self.config.num_experts)
            if dropped_TK is not None:
                chosen_TK = chosen_TK.masked_fill(dropped_TK, self.config.num_experts)
                weight_TK = weight_TK.masked_fill(dropped_TK, 0.0)
        return chosen_TK, weight_TK

    def _choose(self, logits_TE: Tensor, score_TE: Tensor) -> Tensor:
        choice_TE = logits_TE if self.config.choose_by_logits else score_TE
        if self.correction_bias is not None:
            choice_TE = choice_TE + self.correction_bias
        if self.config.num_groups_per_token < self.config.num_groups:
            choice_TE = self._limit_groups(choice_TE)
        return choice_TE.topk(self.config.num_experts_per_token, dim=-1).indices

    def _limit_groups(self, choice_TE: Tensor) -> Tensor:
        """-inf outside the groups that a token may choose from."""
        choice_TGE = choice_TE.unflatten(1, (self.config.num_groups, -1))
        if self.config.group_score == "max":
            score_TG = choice_TGE.amax(-1)
        else:
            score_TG = choice_TGE.topk(2, dim=-1).values.sum(-1)
        allowed = score_TG.topk(self.config.num_groups_per_token, dim=-1).indices
        hidden_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter(1, allowed, False)
        return choice_TGE.masked_fill(hidden_TG[:, :, None], -torch.inf).flatten(1)

    def _weigh(self, weight_TK: Tensor) -> Tensor:
        if self.config.normalize_weights:
            total_T1 = weight_TK.sum(-1, keepdim=True)
            if self.config.scoring == "sigmoid":
                total_T1 = total_T1 + _SMALLEST_SUM
            weight_TK = weight_TK / total_T1
        return weight_TK * self.config.routed_scaling_factor
