"""Perplexity counts what it says it counts, and does not depend on how documents were packed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from herder.data.corpus import DocumentTokens
from herder.data.tokenizer import Tokenizer
from herder.errors import DataError, ModelError
from herder.evaluate.perplexity import (
    PerplexityResult,
    encode_for_scoring,
    evaluate_perplexity,
)
from herder.families.registry import architecture_from_hf, families
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from tests.reference_attend import ReferenceAttend

TEXTS = ["The quick brown fox", "今天天气", "How is the weather today? " * 4, "a"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    json = {**families()["llama"].tiny_config(), "vocab_size": 400}
    built = build_decoder(architecture_from_hf(json, name="tiny"))
    materialize(built, device="cpu")
    initialize_weights(built, seed=0)
    return built


@pytest.fixture
def tokenizer(small_tokenizer_json: str) -> Tokenizer:
    return Tokenizer(small_tokenizer_json, settings={"eos_token": "</s>"})


def documents_of(tokenizer: Tokenizer, texts: list[str]) -> DocumentTokens:
    return encode_for_scoring(tokenizer, texts, max_tokens=10**6)


def num_predictions(documents: DocumentTokens) -> int:
    return documents.num_tokens - documents.num_documents


def alone(decoder: Decoder, documents: DocumentTokens, *, window: int) -> list[float]:
    """Each document's nats, piece by piece, by the plain maths."""
    nats = []
    for ids in np.split(documents.tokens, documents.offsets[1:-1]):
        total = 0.0
        for start in range(0, len(ids) - 1, window):
            piece = torch.from_numpy(ids[start : start + window + 1])
            count = len(piece) - 1
            logits_TV = decoder(
                piece[:-1], positions_T=torch.arange(count), attend=ReferenceAttend([count])
            )
            logprob_TV = logits_TV.double().log_softmax(-1)
            total -= float(logprob_TV[torch.arange(count), piece[1:]].sum().detach())
        nats.append(total)
    return nats


def evaluate(decoder: Decoder, documents: DocumentTokens, *, window: int = 128) -> PerplexityResult:
    return evaluate_perplexity(decoder, documents, window_tokens=window)


@pytest.mark.parametrize("window", [5, 16, 128])
def test_packed_scoring_equals_each_document_alone(
    decoder: Decoder, tokenizer: Tokenizer, window: int
) -> None:
    documents = documents_of(tokenizer, TEXTS)
    result = evaluate(decoder, documents, window=window)
    nats = alone(decoder, documents, window=window)
    total = sum(nats)
    assert result.num_documents == 3, "a document of one token has nothing to predict"
    assert result.num_tokens == len(documents.tokens) - 3
    assert result.model.loss == pytest.approx(total / result.num_tokens, rel=1e-5)
    assert result.model.perplexity == pytest.approx(math.exp(total / result.num_tokens), rel=1e-4)
    expected_bits = total / math.log(2) / result.num_bytes
    assert result.model.bits_per_byte == pytest.approx(expected_bits, rel=1e-5)


def test_the_first_token_and_its_bytes_count_only_after_a_beginning_of_text(
    tokenizer: Tokenizer, small_tokenizer_json: str
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    with_bos = Tokenizer(small_tokenizer_json, settings=config)
    text = "今天 fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    without = documents_of(tokenizer, [text])
    assert num_predictions(without) == len(ids) - 1
    assert without.num_text_bytes == len(text.encode()) - tokenizer.num_bytes(ids[0])
    after_bos = documents_of(with_bos, [text])
    assert num_predictions(after_bos) == len(ids)
    assert after_bos.num_text_bytes == len(text.encode())


def test_the_end_of_text_does_not_count(small_tokenizer_json: str) -> None:
    config = {"eos_token": "</s>", "add_eos_token": True, "add_bos_token": False}
    tokenizer = Tokenizer(small_tokenizer_json, settings=config)
    documents = documents_of(tokenizer, ["The fox", "fox</s>"])
    assert tokenizer.eos_token_id not in documents.tokens


def test_scoring_stops_after_the_document_that_reaches_the_limit(tokenizer: Tokenizer) -> None:
    texts = [f"fox number {index}" for index in range(1000)]
    limited = encode_for_scoring(tokenizer, texts, max_tokens=20)
    last = int(limited.offsets[-1] - limited.offsets[-2])
    assert num_predictions(limited) >= 20
    assert num_predictions(limited) - (last - 1) < 20


def test_the_uniform_baseline_is_the_vocabulary_and_the_unigram_the_entropy_of_counts(
    decoder: Decoder,
) -> None:
    tokens = np.array([9, 1, 1, 2, 3, 9, 1, 2])
    documents = DocumentTokens(tokens, np.array([0, 5, 8]), num_text_bytes=12)
    result = evaluate(decoder, documents)
    assert result.baselines["uniform"].perplexity == pytest.approx(400)
    shares = np.array([3, 2, 1]) / 6
    unigram = result.baselines["unigram"]
    assert unigram.loss == pytest.approx(-(shares * np.log(shares)).sum())
    assert unigram.bits_per_byte == pytest.approx(unigram.loss * 6 / math.log(2) / 12)


def test_the_standard_error_is_that_of_resampled_documents(
    decoder: Decoder, tokenizer: Tokenizer
) -> None:
    generator = np.random.default_rng(0)
    words = ["the", "quick", "fox", "weather", "today", "今天", "how"]
    texts = [str.join(" ", generator.choice(words, generator.integers(2, 20))) for _ in range(60)]
    documents = documents_of(tokenizer, texts)
    nats = np.array(alone(decoder, documents, window=128))
    counts = np.diff(documents.offsets) - 1
    chosen = generator.integers(0, len(nats), (2000, len(nats)))
    means = nats[chosen].sum(1) / counts[chosen].sum(1)
    result = evaluate(decoder, documents)
    assert result.loss_standard_error == pytest.approx(np.std(means), rel=0.1)
    expected = result.model.perplexity * np.std(means)
    assert result.perplexity_standard_error == pytest.approx(expected, rel=0.1)


def test_one_document_has_no_standard_error(decoder: Decoder, tokenizer: Tokenizer) -> None:
    result = evaluate(decoder, documents_of(tokenizer, ["The quick fox"]))
    assert result.loss_standard_error is None
    assert result.perplexity_standard_error is None


def test_progress_ends_at_all_tokens(decoder: Decoder, tokenizer: Tokenizer) -> None:
    documents = documents_of(tokenizer, TEXTS)
    told: list[int] = []
    evaluate_perplexity(decoder, documents, window_tokens=128, on_progress=told.append)
    assert told[-1] == num_predictions(documents)


def test_texts_with_nothing_to_predict_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"nothing to score.* Use --split all"):
        documents_of(tokenizer, ["a", ""])


def test_damaged_weights_are_told_and_not_averaged_away() -> None:
    json = {**families()["llama"].tiny_config(), "vocab_size": 400}
    damaged = build_decoder(architecture_from_hf(json, name="tiny"))
    materialize(damaged, device="cpu")
    initialize_weights(damaged, seed=0)
    with torch.no_grad():
        damaged.get_parameter("embed.weight")[5] = torch.nan
    with pytest.raises(ModelError, match="probability that is no number"):
        evaluate(damaged, DocumentTokens(np.array([1, 5, 2]), np.array([0, 3]), num_text_bytes=3))
