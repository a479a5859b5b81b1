"""The tokenizer inside a GGUF file, as the tokenizer.json and tokenizer_config.json it came from.

Owns what llama.cpp's tokenizer names mean. GPT-2 style byte-level BPE keeps its merges in the file;
a SentencePiece vocabulary keeps scores, from which merges are derived. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = [{**_BYTES, "use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, _BYTES]


PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
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


def tokenizer_json(metadata: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The contents of tokenizer.json. Raises ModelError for a tokenizer that cannot be read."""
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{where}: this GGUF file holds no tokenizer (tokenizer.ggml.tokens).")
    if model == "gpt2":
        parts = _byte_level(metadata, where)
    elif model == "llama":
        parts = _sentencepiece(metadata, where)
    else:
        raise ModelError(
            f"{where}: tokenizer.ggml.model {model!r} is not supported. Supported: gpt2, llama."
        )
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata),
        **parts,
        "post_processor": _post_processor(metadata, parts["post_processor"]),
    }


def _byte_level(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported. "
            f"{close_match(str(pre), PRE_TOKENIZERS)}"
        )
    steps = PRE_TOKENIZERS[pre]
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError(f"{where}: this GGUF file holds no merges (tokenizer.ggml.merges).")
    model = {
        "type": "BPE",
        "ignore_merges": pre in _TAKES_WHOLE_WORDS,
        "vocab": _vocabulary(metadata),
        "merges": [merge.split(" ", 1) for merge in merges],
    }
    sequence = {"type": "Sequence", "pretokenizers": steps}
    return {
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": sequence if len(steps) > 1 else steps[0],
        "decoder": {**_BYTES, "use_regex": True},
        "post_processor": pre in _TAKES_WHOLE_WORDS,
        "model": model,
    }


def _sentencepiece(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"{where}: tokenizer.ggml.scores does not fit {len(tokens)} tokens, so the order of "
            "merges is unknown."
        )
    vocabulary = _vocabulary(metadata)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "post_processor": True,
        "model": {
            "type": "BPE",
            "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges_by_score(vocabulary, scores),
        },
    }


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[list[str]]:
    """Every way to make a piece of two others, best piece first, as SentencePiece would merge."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [[left, right] for _, _, _, left, right in found]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _added_tokens(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (_CONTROL, _UNKNOWN),
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(metadata: Mapping[str, Any], starts_with_bos: bool) -> dict[str, Any] | None:
    """Adds BOS and EOS where the file, or else the kind of tokenizer, says so."""
    tokens = metadata["tokenizer.ggml.tokens"]
    special: dict[str, int] = {}
    for each, default in (("bos", starts_with_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{each}_token_id")
        if index is not None and metadata.get(f"tokenizer.ggml.add_{each}_token", default):
            special[each] = index
    if not special:
        return None

    def text(which: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": which, "type_id": type_id}}]
        ends = {
            each: [{"SpecialToken": {"id": tokens[index], "type_id": type_id}}]
            for each, index in special.items()
        }
        return [*ends.get("bos", []), *parts, *ends.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in special.values()
        },
    }


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
