"""The tokenizer inside a GGUF file, as the tokenizer.json and tokenizer_config.json it came from.

Owns what llama.cpp's tokenizer names mean. GPT-2 style byte-level BPE keeps its merges in the file;
a SentencePiece vocabulary keeps scores, from which merges are derived. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from herder.errors import ModelError, close_match

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


PRE_TOKENIZERS: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "smaug-bpe": _split(_LLAMA3),
    "dbrx": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}
"""llama.cpp's `tokenizer.ggml.pre` -> how text is cut before merging.

Source: llama.cpp, src/llama-vocab.cpp, and the published tokenizer.json of each model.
"""
_NORMALIZED = {"qwen2", "deepseek-r1-qwen"}
"""Pre-tokenizers whose models compose characters first (NFC)."""
_TAKES_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Models that take a word that is a token as it is, before any merge; they also start with BOS."""


def build_tokenizer(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """The tokenizer, to be saved as tokenizer.json. Raises ModelError where it cannot be read."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{where}: this GGUF file holds no tokenizer (tokenizer.ggml.tokens).")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{where}: tokenizer.ggml.model {kind!r} is not supported. Supported: gpt2, llama."
        )
    tokenizer = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, where)
    starts_with_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _TAKES_WHOLE_WORDS
    _add_ends(tokenizer, metadata, starts_with_bos)
    _add_tokens(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported. "
            f"{close_match(str(pre), PRE_TOKENIZERS)}"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError(f"{where}: this GGUF file holds no merges (tokenizer.ggml.merges).")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = _bpe(metadata, pairs, where, ignore_merges=pre in _TAKES_WHOLE_WORDS)
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"{where}: tokenizer.ggml.scores does not fit {len(tokens)} tokens, so the order of "
            "merges is unknown."
        )
    merges = _merges_by_score(_vocabulary(metadata), scores)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = _bpe(metadata, merges, where, **options)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    restore = decoders.Replace(_SPACE, " ")
    tokenizer.decoder = decoders.Sequence(
        [restore, decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(metadata: Mapping[str, Any], merges: Any, where: str, **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(_vocabulary(metadata), merges, **options))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{where}: the tokenizer cannot be read: {error}.") from None


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first, as SentencePiece would merge."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            is_special = kind != _USER_DEFINED
            added[is_special].append(AddedToken(token, normalized=False, special=is_special))
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], starts_with_bos: bool) -> None:
    """Adds BOS and EOS where the file, or else the kind of tokenizer, says so."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ends: dict[str, int] = {}
    for each, default in (("bos", starts_with_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{each}_token_id")
        if index is not None and metadata.get(f"tokenizer.ggml.add_{each}_token", default):
            ends[each] = index
    if ends:
        bos, eos = ([tokens[ends[each]]] if each in ends else [] for each in ("bos", "eos"))
        single = [*bos, "$A", *eos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{part}:1" for part in (*bos, "$B", *eos))],
            special_tokens=[(tokens[index], index) for index in ends.values()],
        )


def tokenizer_config_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens by role, and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokens[index] for role, index in ids.items() if index is not None},
    }
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}
