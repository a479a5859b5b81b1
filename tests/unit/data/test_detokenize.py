"""Streaming is exact: the pieces joined are the decoded whole, and no piece is half a character."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from herder.data.tokenizer import Tokenizer


def byte_fallback_json() -> str:
    """A SentencePiece-like vocabulary: words with their space, characters, and bytes."""
    words = ["▁the", "▁fox", "▁", "a", "b", "今", "▁天", "fox", "�"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend.to_str()


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, small_tokenizer_json: str) -> Tokenizer:
    stored = small_tokenizer_json if request.param == "byte_level" else byte_fallback_json()
    return Tokenizer(stored)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.detokenizer()
    return [*(decoder.add(token_id) for token_id in ids), decoder.finish()]


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_joined_are_the_decoded_whole(tokenizer: Tokenizer, seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(20):
        ids = [generator.randrange(tokenizer.vocab_size + 2) for _ in range(24)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_characters_of_several_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    text = "今天天气如何 \U0001f600é fox"
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "\ufffd" not in "".join(pieces)


def test_text_is_shown_as_soon_as_it_is_certain(small_tokenizer_json: str) -> None:
    tokenizer = Tokenizer(small_tokenizer_json)
    ids = tokenizer.encode("The fox \U0001f600 today", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    waiting = [index for index, piece in enumerate(pieces[:-1]) if not piece]
    assert len(waiting) <= 3, "only the bytes of the emoji wait"
    assert pieces[-1] == ""


def test_an_unfinished_character_is_replaced_only_at_the_end(small_tokenizer_json: str) -> None:
    tokenizer = Tokenizer(small_tokenizer_json)
    ids = tokenizer.encode("ok \U0001f600", add_special_tokens=False)[:-1]
    pieces = stream(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert pieces[-1].endswith("\ufffd")


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    tokenizer = Tokenizer(byte_fallback_json())
    vocabulary = json.loads(byte_fallback_json())["model"]["vocab"]
    the, fox = vocabulary["▁the"], vocabulary["▁fox"]
    assert tokenizer.detokenizer().add(fox) == "fox"
    assert tokenizer.detokenizer(context=[the]).add(fox) == " fox"


def test_a_character_that_the_prompt_began_is_finished(small_tokenizer_json: str) -> None:
    tokenizer = Tokenizer(small_tokenizer_json)
    ids = tokenizer.encode("x\U0001f600", add_special_tokens=False)
    decoder = tokenizer.detokenizer(context=ids[:-1])
    assert decoder.add(ids[-1]) == "\U0001f600"


def test_a_finished_stream_has_nothing_more_to_say(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.detokenizer()
    decoder.add(tokenizer.encode("fox", add_special_tokens=False)[0])
    decoder.finish()
    assert decoder.finish() == ""
