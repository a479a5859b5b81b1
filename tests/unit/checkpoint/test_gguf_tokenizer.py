from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.gguf_tokenizer import (
    PRE_TOKENIZERS,
    build_tokenizer,
    tokenizer_config_json,
)
from herder.errors import ModelError

TEXTS = (
    "What is the capital of France?",
    "Years 1999 and 12345678, it's DON'T x=1;\tfoo()\r\n\n  indented",
    "今天天气如何 naïve Ünïcode \u0301 🙂",
)


def backend(metadata: dict[str, Any]) -> Tokenizer:
    return build_tokenizer(metadata, where="test")


def byte_level(small_tokenizer_json: str, **entries: Any) -> dict[str, Any]:
    """What a converter would write of the small byte-level tokenizer."""
    model = json.loads(small_tokenizer_json)["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in entries.items()},
    }


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_tokenizer_encodes_as_the_one_it_came_from(
    text: str, small_tokenizer_json: str
) -> None:
    original = Tokenizer.from_str(small_tokenizer_json)
    rebuilt = backend(byte_level(small_tokenizer_json))
    text = f"<|im_start|>{text}<|im_end|>"
    assert rebuilt.encode(text).ids == original.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_gives_text_back(pre: str, small_tokenizer_json: str) -> None:
    rebuilt = backend(byte_level(small_tokenizer_json, pre=pre, add_bos_token=False))
    for text in TEXTS[:2]:
        assert rebuilt.decode(rebuilt.encode(text).ids) == text


def pieces(pre: str, text: str, small_tokenizer_json: str) -> list[str]:
    cutter = backend(byte_level(small_tokenizer_json, pre=pre)).pre_tokenizer
    assert cutter is not None
    return [piece.replace("Ġ", " ") for piece, _ in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("gpt-2", ["a", " 12345", "'s", " (", "x", ")"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "5", "'s", " (", "x", ")"]),
        ("llama-bpe", ["a", " ", "123", "45", "'s", " (", "x", ")"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "5", "'s", " (", "x", ")"]),
        ("tekken", ["a", " ", "1", "2", "3", "4", "5", "'s", " (", "x", ")"]),
    ],
)
def test_numbers_and_words_are_cut_as_each_model_does(
    pre: str, wanted: list[str], small_tokenizer_json: str
) -> None:
    assert pieces(pre, "a 12345's (x)", small_tokenizer_json) == wanted


def test_bos_is_added_where_the_file_or_the_kind_of_tokenizer_says_so(
    small_tokenizer_json: str,
) -> None:
    def first(**entries: Any) -> list[int]:
        return backend(byte_level(small_tokenizer_json, **entries)).encode("a").ids

    plain = first()
    assert first(add_bos_token=True) == [0, *plain]
    assert first(add_bos_token=True, add_eos_token=True) == [0, *plain, 1]
    assert first(pre="llama-bpe") == [0, *plain]
    assert first(pre="llama-bpe", add_bos_token=False) == plain


SPACE = "\u2581"


def sentencepiece() -> dict[str, Any]:
    """A SentencePiece vocabulary: bytes, letters, and pieces whose scores order the merges."""
    words = [f"{SPACE}t", "he", f"{SPACE}the", "re", f"{SPACE}there", "er", "in"]
    letters = [SPACE, *"theriqzn"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words) + len(letters))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_a_sentencepiece_vocabulary_merges_best_scores_first() -> None:
    rebuilt = backend(sentencepiece())
    # "er" would be merged before "re" if scores did not count.
    assert rebuilt.encode("there in").tokens == ["<s>", f"{SPACE}there", SPACE, "in"]
    assert rebuilt.decode(rebuilt.encode("there in").ids) == "there in"


def test_a_sentencepiece_tokenizer_falls_back_to_bytes() -> None:
    rebuilt = backend(sentencepiece())
    encoded = rebuilt.encode("é<s>")
    assert encoded.tokens == ["<s>", SPACE, "<0xC3>", "<0xA9>", "<s>"]
    assert rebuilt.decode(encoded.ids) == "é"


def test_a_sentencepiece_tokenizer_equals_one_built_by_hand() -> None:
    metadata = sentencepiece()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [(SPACE, "t"), ("h", "e"), (f"{SPACE}t", "he"), ("r", "e"), (f"{SPACE}the", "re")]
    merges += [("e", "r"), ("i", "n")]
    by_hand = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    by_hand.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    by_hand.decoder = decoders.ByteFallback()
    rebuilt = backend({**metadata, "tokenizer.ggml.add_bos_token": False})
    for text in ("there", "the tree in there", "q 日 z", "  the  "):
        assert rebuilt.encode(text).ids == by_hand.encode(text).ids


def test_special_tokens_and_the_chat_template_come_along(small_tokenizer_json: str) -> None:
    metadata = {
        **byte_level(small_tokenizer_json, padding_token_id=3),
        "tokenizer.chat_template": "{{ messages }}",
    }
    config = tokenizer_config_json(metadata)
    assert config["bos_token"] == "<s>"
    assert config["pad_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages }}"
    assert "unk_token" not in config


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, "holds no tokenizer"),
        ({**sentencepiece(), "tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
        ({**sentencepiece(), "tokenizer.ggml.scores": [0.0]}, "scores does not fit"),
        (
            {**sentencepiece(), "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen"},
            "'qwen' is not supported. Did you mean 'qwen2'",
        ),
        ({**sentencepiece(), "tokenizer.ggml.model": "gpt2"}, "holds no merges"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_tokenizer(metadata, where="x.gguf")


@pytest.mark.package_data
def test_the_real_tokenizer_gives_text_back_and_has_its_chat_template(smollm2_gguf: Path) -> None:
    metadata = dict(read_gguf(smollm2_gguf).metadata)
    rebuilt = backend(metadata)
    for text in TEXTS:
        assert rebuilt.decode(rebuilt.encode(text).ids) == text
    assert rebuilt.encode("What is the capital").tokens == ["What", "Ġis", "Ġthe", "Ġcapital"]
    assert "im_start" in tokenizer_config_json(metadata)["chat_template"]
