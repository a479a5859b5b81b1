"""One model's perplexity in the formats of weights it may be served in: what quantizing costs."""

from __future__ import annotations

from herder.checkpoint.source import ModelSource
from herder.config.quantization import WeightQuantization
from herder.data.corpus import DocumentTokens
from herder.data.progress import progress
from herder.evaluate.model import Precision, load_model
from herder.evaluate.perplexity import PerplexityResult, evaluate_perplexity


def score_formats(
    source: ModelSource,
    documents: DocumentTokens,
    quantization: WeightQuantization | None,
    *,
    precision: Precision,
    window_tokens: int,
) -> dict[str, PerplexityResult]:
    """The results by format: quantized first, where that is asked for, and in `precision`.

    One of the models is in memory at a time.
    """
    results: dict[str, PerplexityResult] = {}
    for how in (None,) if quantization is None else (quantization, None):
        name = str(how or precision)
        decoder = load_model(source, precision=precision, quantization=how)
        num_predictions = documents.num_tokens - documents.num_documents
        with progress(f"evaluating {source.name} in {name}", num_predictions) as show:
            results[name] = evaluate_perplexity(
                decoder, documents, window_tokens=window_tokens, on_progress=show
            )
    return results
