"""Whether this decoder computes what another implementation did: logits, layers, greedy tokens.

Compares with stored or freshly made numbers, and with itself in two ways that must not matter:
token by token through a cache, and packed with other documents. Knows no file and no library.

Legend: R rows, T tokens of one row, V vocabulary, G greedy tokens, L layers, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from herder.config.architecture import ArchitectureConfig
from herder.errors import ModelError
from herder.evaluate.golden import Golden, Row
from herder.model.attend import Attend, PackedAttend
from herder.model.cache import KvCache
from herder.model.decoder import Decoder
from herder.model.routing import Routing, load_balancing_loss

TOLERANCE = 1e-4
"""Largest logit difference allowed in fp32. Two correct orders of summation were seen 1.5e-5 apart
on logits of standard deviation 2; a wrong formula moves them by far more than 1e-3. Logits larger
than that grow their rounding in proportion, so the tolerance is per LOGIT_SCALE of the largest."""
LOGIT_SCALE = 16.0


@dataclass(frozen=True)
class ParityReport:
    """The differences found. All are largest absolute values, in logits unless said otherwise."""

    reference: str
    """Who computed what was compared with."""
    tolerance: float
    max_abs_difference: float
    num_rows_left_out: int
    """Padded rows of models of whose queries transformers counts the padding (Llama 4)."""
    worst_row: int
    worst_position: int
    by_position: list[float]
    """Over all rows, by the token's place in its row."""
    by_layer: dict[str, float]
    """Hidden states of the first row: embedding, each layer, the last one after the final norm."""
    first_differing_layer: str | None
    """Where hidden states first differ by more than the tolerance, scaled by their size."""
    aux_loss_difference: float | None
    """Of the routers' load balancing, over all rows and over the first; None: nothing to compare
    with."""
    greedy_agreement: float
    """Share of greedy tokens that agree."""
    cached_max_abs_difference: float
    packed_max_abs_difference: float

    @property
    def greedy_equal(self) -> bool:
        """Whether every greedy token agrees."""
        return self.greedy_agreement == 1.0

    @property
    def passed(self) -> bool:
        """Whether all comparisons hold."""
        differences = (
            self.max_abs_difference,
            self.cached_max_abs_difference,
            self.packed_max_abs_difference,
            self.aux_loss_difference or 0.0,
        )
        return all(each <= self.tolerance for each in differences) and self.greedy_equal


class BatchAttend(Attend):
    """An attend whose texts count as long as the longest of a batch.

    transformers stretches dynamic and longrope frequencies by the batch, where this decoder goes by
    each document alone; to compare, the batch's length is put in its place.
    """

    def __init__(self, attend: Attend, *, num_tokens: int, longest: int) -> None:
        self.attend = attend
        self.routing = attend.routing
        self.num_tokens = num_tokens
        self.longest = longest

    def layer(self, index: int) -> Attend:
        return self.attend.layer(index)

    def context_T(self) -> Tensor:
        return torch.full((self.num_tokens,), self.longest)


def compare(decoder: Decoder, golden: Golden) -> ParityReport:
    """Runs an fp32 decoder on the rows and says how far it is from what they must give.

    Raises ModelError when rows and model do not belong together.
    """
    _refuse_foreign(decoder.config, golden)
    rows = [row for row in golden.rows if not (row.num_pads and _counts_padding(decoder.config))]
    with torch.inference_mode():
        logits, hidden, aux_loss = _forward(decoder, rows)
        pairs = zip(logits, rows, strict=True)
        difference_TR = pad_sequence([(own - row.logits_TV).abs().amax(-1) for own, row in pairs])
        worst_position, worst_row = divmod(int(difference_TR.argmax()), len(rows))
        by_layer, first = _by_layer(hidden, golden.hidden_LTD)
        agreeing_RG = _greedy_RG(decoder, rows) == torch.stack([row.greedy_G for row in rows])
        largest = max(float(row.logits_TV.abs().max()) for row in rows)
        return ParityReport(
            reference=golden.origin,
            tolerance=TOLERANCE * max(1.0, largest / LOGIT_SCALE),
            max_abs_difference=float(difference_TR.max()),
            num_rows_left_out=len(golden.rows) - len(rows),
            worst_row=worst_row,
            worst_position=worst_position,
            by_position=difference_TR.amax(1).tolist(),
            by_layer=by_layer,
            first_differing_layer=first,
            aux_loss_difference=_aux_loss_difference(decoder, golden, aux_loss),
            greedy_agreement=float(agreeing_RG.double().mean()),
            cached_max_abs_difference=cached_difference(decoder, rows[0].tokens_T),
            packed_max_abs_difference=packed_difference(decoder, [row.tokens_T for row in rows]),
        )


def _refuse_foreign(config: ArchitectureConfig, golden: Golden) -> None:
    width = golden.rows[0].logits_TV.shape[-1]
    largest = max(int(row.tokens_T.max()) for row in golden.rows)
    if width != config.vocab_size or largest >= config.vocab_size:
        raise ModelError(
            f"{golden.origin} has logits over {width} tokens and ids up to {largest}; this model's "
            f"vocabulary has {config.vocab_size}. They are of different models."
        )


def _counts_padding(config: ArchitectureConfig) -> bool:
    """Whether transformers counts padding in a query's temperature, as it does for Llama 4: then
    what it computes of padded rows is not what they are without."""
    temperature = getattr(config.attention, "temperature", None)
    return temperature is not None and temperature.position_offset == 1


def _aux_loss_difference(decoder: Decoder, golden: Golden, aux_loss: float | None) -> float | None:
    if aux_loss is None:
        return None
    differences: list[float] = []
    if golden.aux_loss is not None:
        differences.append(abs(aux_loss - golden.aux_loss))
    if golden.aux_loss_row0 is not None:
        alone = _forward(decoder, golden.rows[:1])[2]
        assert alone is not None, "the layers that were routed are so still"
        differences.append(abs(alone - golden.aux_loss_row0))
    return max(differences, default=None)


def _forward(
    decoder: Decoder, rows: Sequence[Row]
) -> tuple[list[Tensor], list[Tensor], float | None]:
    """Logits of each row; of the first row, what embedding, layers but the last and norm return;
    the load-balancing loss where layers are routed."""
    lengths = [len(row.tokens_T) for row in rows]
    positions_T = torch.cat([row.positions_T for row in rows])
    routing = Routing(None)
    attend = BatchAttend(
        PackedAttend(lengths, routing=routing),
        num_tokens=sum(lengths),
        longest=int(positions_T.max()) + 1,
    )
    assert decoder.embed is not None, "parity is of whole models"
    assert decoder.norm is not None, "parity is of whole models"
    hidden: list[Tensor] = []

    def record(_module: nn.Module, _given: object, returned: Tensor) -> None:
        hidden.append(returned)

    with ExitStack() as hooks:
        for part in (decoder.embed, *list(decoder.layers.values())[:-1], decoder.norm):
            hooks.enter_context(part.register_forward_hook(record))
        logits_TV = decoder(
            torch.cat([row.tokens_T for row in rows]), positions_T=positions_T, attend=attend
        )
    aux_loss = None
    if routing.records and decoder.config.moe is not None:
        aux_loss = float(load_balancing_loss(routing.records, decoder.config.moe.num_experts))
    return list(logits_TV.split(lengths)), [each[: lengths[0]] for each in hidden], aux_loss


def _by_layer(
    hidden: Sequence[Tensor], wanted_LTD: Tensor | None
) -> tuple[dict[str, float], str | None]:
    """Differences by name, and the first name whose own is too large."""
    if wanted_LTD is None:
        return {}, None
    if len(hidden) != len(wanted_LTD) or hidden[0].shape != wanted_LTD[0].shape:
        raise ModelError(
            f"hidden states of shape {list(wanted_LTD.shape)} do not belong to this model, which "
            f"has {len(hidden)} times {list(hidden[0].shape)}"
        )
    names = ["embed", *(f"layers.{index}" for index in range(len(hidden) - 2)), "norm"]
    pairs = dict(zip(names, zip(hidden, wanted_LTD, strict=True), strict=True))
    differences = {name: float((own - wanted).abs().max()) for name, (own, wanted) in pairs.items()}
    differing = (
        name
        for name, (_, wanted) in pairs.items()
        if not differences[name] <= TOLERANCE * max(1.0, float(wanted.abs().max()))
    )
    return differences, next(differing, None)


def _greedy_RG(decoder: Decoder, rows: Sequence[Row]) -> Tensor:
    """The most likely tokens after each row, one by one through a cache, as one batch would."""
    num_new = len(rows[0].greedy_G)
    caches = [_cache(decoder, len(row.tokens_T) + num_new) for row in rows]
    new = [row.tokens_T for row in rows]
    tokens: list[Tensor] = []
    for _ in range(num_new):
        longest = max(cache.length + len(given) for cache, given in zip(caches, new, strict=True))
        new = [
            _step(decoder, cache, given, longest=longest)[-1:].argmax(-1)
            for cache, given in zip(caches, new, strict=True)
        ]
        tokens.append(torch.cat(new))
    return torch.stack(tokens, dim=1)


def _cache(decoder: Decoder, num_tokens: int) -> KvCache:
    return KvCache(decoder.config, num_tokens=num_tokens, dtype=torch.float32)


def _step(
    decoder: Decoder, cache: KvCache, tokens_T: Tensor, *, longest: int | None = None
) -> Tensor:
    """logits_TV of new tokens after what the cache holds, which then holds them too."""
    num_new = len(tokens_T)
    attend = cache.attend(num_new)
    if longest is not None:
        attend = BatchAttend(attend, num_tokens=num_new, longest=longest)
    logits_TV = decoder(tokens_T, positions_T=cache.positions_T(num_new), attend=attend)
    cache.advance(num_new)
    return logits_TV


def cached_difference(decoder: Decoder, tokens_T: Tensor) -> float:
    """How far logits through a cache, half at once and then one by one, are from a whole forward.

    Frequencies that change with the text's length (dynamic, longrope) keep old keys at the angles
    they were written with, so there the two agree up to the original window, and that is compared.
    """
    windows = [
        rope.scaling.original_max_position_embeddings
        for rope in decoder.config.ropes
        if rope.scaling.kind in ("dynamic", "longrope")
    ]
    num_tokens = min([len(tokens_T), *windows])
    tokens_T = tokens_T[:num_tokens]
    whole_TV = _alone(decoder, tokens_T)
    cache = _cache(decoder, num_tokens)
    first = max(num_tokens // 2, 1)
    pieces = [tokens_T[:first], *tokens_T[first:].split(1)]
    cached_TV = torch.cat([_step(decoder, cache, piece) for piece in pieces if len(piece)])
    return float((cached_TV - whole_TV).abs().max())


def packed_difference(decoder: Decoder, documents: Sequence[Tensor]) -> float:
    """How far logits of documents in one packed forward are from those of each alone."""
    lengths = [len(tokens_T) for tokens_T in documents]
    packed_TV = decoder(
        torch.cat(list(documents)),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        attend=PackedAttend(lengths),
    )
    return max(
        float((own_TV - _alone(decoder, tokens_T)).abs().max())
        for own_TV, tokens_T in zip(packed_TV.split(lengths), documents, strict=True)
    )


def _alone(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    length = len(tokens_T)
    return decoder(tokens_T, positions_T=torch.arange(length), attend=PackedAttend([length]))


def report_json(report: ParityReport, *, model: str) -> dict[str, Any]:
    """All of the report; keys are its field names, null stands for what is not finite."""
    verdicts = {"passed": report.passed, "greedy_equal": report.greedy_equal}
    fields = json.loads(json.dumps(asdict(report)), parse_constant=lambda _name: None)
    return {"model": model, **verdicts, **fields}


def report_text(report: ParityReport, *, model: str) -> str:
    """What agrees and what does not, with the place to look first."""
    checks = [
        ("logits", report.max_abs_difference, f"against {report.reference}"),
        ("cached", report.cached_max_abs_difference, "token by token, against a whole forward"),
        ("packed", report.packed_max_abs_difference, "with other documents, against alone"),
    ]
    if report.aux_loss_difference is not None:
        checks.append(("router", report.aux_loss_difference, "load balancing of the routers"))
    left_out = (
        f", {report.num_rows_left_out} padded rows left out" if report.num_rows_left_out else ""
    )
    count = len(report.by_position)
    places = sorted({*range(0, count, max(1, count // 8)), count - 1, report.worst_position})
    positions = [f"{place}: {report.by_position[place]:.1e}" for place in places]
    layers = [f"{name} {value:.1e}" for name, value in report.by_layer.items()]
    if report.first_differing_layer:
        where = f"first to differ: {report.first_differing_layer}"
    elif report.max_abs_difference > report.tolerance:
        where = (
            f"worst: row {report.worst_row}, position {report.worst_position} (hidden states of "
            "row 0 agree where they are known)"
        )
    else:
        where = "logits agree: look at what the cache or the packing changes"
    verdict = {True: "equal", False: "DIFFER"}
    return "\n  ".join(
        [
            f"{model}: {'passed' if report.passed else 'FAILED'}, tolerance {report.tolerance:.1e}"
            + left_out,
            *(
                f"{name}  {difference:9.2e}  {verdict[difference <= report.tolerance]:6}  {what}"
                for name, difference, what in checks
            ),
            f"greedy  {report.greedy_agreement:9.1%}  {verdict[report.greedy_equal]:6}  of the "
            "tokens agree",
            f"by position  {'  '.join(positions)}",
            *([f"by layer  {'  '.join(layers)}"] if layers else []),
            *([] if report.passed else [where]),
        ]
    )
