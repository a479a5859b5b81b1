"""Whether this decoder computes what another implementation did: logits, layers, greedy tokens.

Compares with stored or freshly made numbers, and with itself in two ways that must not matter:
token by token through a cache, and packed with other documents. Knows no file and no library.

Legend: T tokens of one row, V vocabulary, L layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from herder.config.architecture import ArchitectureConfig
from herder.errors import ModelError
from herder.evaluate.golden import Golden, Row
from herder.model.attend import Attend, PackedAttend
from herder.model.cache import KvCache
from herder.model.decoder import Decoder

TOLERANCE = 1e-4
"""Largest logit difference allowed in fp32. Two correct orders of summation were seen 1.5e-5 apart
on logits of standard deviation 2; a wrong formula moves them by far more than 1e-3. Logits larger
than that grow their rounding in proportion, so the tolerance is per LOGIT_SCALE of the largest."""
LOGIT_SCALE = 16.0


@dataclass(frozen=True)
class ParityReport:
    """The differences found. All are largest absolute values, in logits unless said otherwise."""

    origin: str
    tolerance: float
    max_abs_difference: float
    worst_row: int
    worst_position: int
    by_position: tuple[float, ...]
    """Over all rows, by the token's place in its row."""
    by_layer: tuple[float, ...]
    """Hidden states of the first row: embedding, each layer, the last one after the final norm."""
    first_differing_layer: str | None
    """Where hidden states first differ by more than the tolerance, scaled by their size."""
    greedy_equal: bool
    greedy_agreement: float
    """Share of greedy tokens that agree."""
    cached_max_abs_difference: float
    packed_max_abs_difference: float

    @property
    def passed(self) -> bool:
        """Whether all comparisons hold."""
        largest = max(
            self.max_abs_difference,
            self.cached_max_abs_difference,
            self.packed_max_abs_difference,
        )
        return largest <= self.tolerance and self.greedy_equal


class BatchAttend(Attend):
    """An attend whose texts count as long as the longest of a batch.

    transformers stretches dynamic and longrope frequencies by the batch, where this decoder goes by
    each document alone; to compare, the batch's length is put in its place.
    """

    def __init__(self, attend: Attend, *, num_tokens: int, longest: int) -> None:
        self.attend = attend
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
    with torch.inference_mode():
        logits, hidden = _forward(decoder, golden.rows)
        differences = [
            (own - row.logits_TV).abs().amax(-1)
            for own, row in zip(logits, golden.rows, strict=True)
        ]
        worst = max(range(len(differences)), key=lambda row: float(differences[row].max()))
        tokens = _greedy(decoder, golden.rows)
        agreeing = [
            own == row.greedy_G.tolist() for own, row in zip(tokens, golden.rows, strict=True)
        ]
        by_layer, first = _by_layer(hidden, golden.hidden_LTD)
        return ParityReport(
            origin=golden.origin,
            tolerance=_tolerance(golden),
            max_abs_difference=float(differences[worst].max()),
            worst_row=worst,
            worst_position=int(differences[worst].argmax()),
            by_position=_by_position(differences),
            by_layer=by_layer,
            first_differing_layer=first,
            greedy_equal=all(agreeing),
            greedy_agreement=_agreement(tokens, golden.rows),
            cached_max_abs_difference=cached_difference(decoder, golden.rows[0].tokens_T),
            packed_max_abs_difference=packed_difference(
                decoder, [row.tokens_T for row in golden.rows]
            ),
        )


def _tolerance(golden: Golden) -> float:
    largest = max(float(row.logits_TV.abs().max()) for row in golden.rows)
    return TOLERANCE * max(1.0, largest / LOGIT_SCALE)


def _refuse_foreign(config: ArchitectureConfig, golden: Golden) -> None:
    width = golden.rows[0].logits_TV.shape[-1]
    largest = max(int(row.tokens_T.max()) for row in golden.rows)
    if width != config.vocab_size or largest >= config.vocab_size:
        raise ModelError(
            f"{golden.origin} has logits over {width} tokens and ids up to {largest}; this model's "
            f"vocabulary has {config.vocab_size}. They are of different models."
        )


def _forward(decoder: Decoder, rows: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of each row, and the first row's hidden states by layer."""
    lengths = [len(row.tokens_T) for row in rows]
    positions_T = torch.cat([row.positions_T for row in rows])
    attend = BatchAttend(
        PackedAttend(lengths), num_tokens=sum(lengths), longest=int(positions_T.max()) + 1
    )
    with _recorded(decoder) as hidden:
        logits_TV = decoder(
            torch.cat([row.tokens_T for row in rows]), positions_T=positions_T, attend=attend
        )
    return list(logits_TV.split(lengths)), [each[: lengths[0]] for each in hidden]


@contextmanager
def _recorded(decoder: Decoder) -> Generator[list[Tensor]]:
    """What the embedding, each layer but the last, and the final norm return."""
    hidden: list[Tensor] = []

    def record(module: nn.Module, given: object, returned: Tensor) -> None:
        del module, given
        hidden.append(returned)

    assert decoder.embed is not None, "parity is of whole models"
    assert decoder.norm is not None, "parity is of whole models"
    parts = [decoder.embed, *list(decoder.layers.values())[:-1], decoder.norm]
    hooks = [part.register_forward_hook(record) for part in parts]
    try:
        yield hidden
    finally:
        for hook in hooks:
            hook.remove()


def _by_position(differences: Sequence[Tensor]) -> tuple[float, ...]:
    longest = max(len(difference) for difference in differences)
    return tuple(
        max(float(each[position]) for each in differences if position < len(each))
        for position in range(longest)
    )


def _by_layer(
    hidden: Sequence[Tensor], wanted_LTD: Tensor | None
) -> tuple[tuple[float, ...], str | None]:
    if wanted_LTD is None:
        return (), None
    if len(hidden) != len(wanted_LTD) or hidden[0].shape != wanted_LTD[0].shape:
        raise ModelError(
            f"hidden states of shape {list(wanted_LTD.shape)} do not belong to this model, which "
            f"has {len(hidden)} times {list(hidden[0].shape)}"
        )
    pairs = list(zip(hidden, wanted_LTD, strict=True))
    differences = tuple(float((own - wanted).abs().max()) for own, wanted in pairs)
    names = ["embed", *(f"layers.{index}" for index in range(len(hidden) - 2)), "norm"]
    for name, difference, (_, wanted) in zip(names, differences, pairs, strict=True):
        if difference > TOLERANCE * max(1.0, float(wanted.abs().max())):
            return differences, name
    return differences, None


def _greedy(decoder: Decoder, rows: Sequence[Row]) -> list[list[int]]:
    """The most likely tokens after each row, one by one through a cache, as one batch would."""
    num_new = len(rows[0].greedy_G)
    caches = [_cache(decoder, len(row.tokens_T) + num_new) for row in rows]
    new = [row.tokens_T for row in rows]
    tokens: list[list[int]] = [[] for _ in rows]
    for _ in range(num_new):
        longest = max(cache.length + len(given) for cache, given in zip(caches, new, strict=True))
        for row, cache in enumerate(caches):
            logits_V = _step(decoder, cache, new[row], longest=longest)[-1]
            tokens[row].append(int(logits_V.argmax()))
            new[row] = torch.tensor(tokens[row][-1:])
    return tokens


def _agreement(tokens: Sequence[Sequence[int]], rows: Sequence[Row]) -> float:
    pairs = [
        own == wanted
        for made, row in zip(tokens, rows, strict=True)
        for own, wanted in zip(made, row.greedy_G.tolist(), strict=True)
    ]
    return sum(pairs) / len(pairs)


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
    tokens_T = tokens_T[: _length_of_fixed_angles(decoder.config, len(tokens_T))]
    num_tokens = len(tokens_T)
    whole_TV = _alone(decoder, tokens_T)
    cache = _cache(decoder, num_tokens)
    first = max(num_tokens // 2, 1)
    pieces = [tokens_T[:first], *tokens_T[first:].split(1)]
    cached_TV = torch.cat([_step(decoder, cache, piece) for piece in pieces if len(piece)])
    return float((cached_TV - whole_TV).abs().max())


def _length_of_fixed_angles(config: ArchitectureConfig, num_tokens: int) -> int:
    windows = [
        rope.scaling.original_max_position_embeddings
        for rope in config.ropes
        if rope.scaling.kind in ("dynamic", "longrope")
    ]
    return min([num_tokens, *windows])


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
