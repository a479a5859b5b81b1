"""Results as a table for people and as one JSON object for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from herder.evaluate.perplexity import PerplexityResult


def perplexity_json(results: Mapping[str, PerplexityResult]) -> dict[str, Any]:
    """The first result under its fields' names, its score at the top; of the second, which is the
    same model's before it was quantized, the score, and the ratio of perplexities to it."""
    result, *others = results.values()
    figures: dict[str, Any] = asdict(result)
    if others:
        wide = others[0].model
        figures |= {
            "quantization": next(iter(results)),
            "unquantized": asdict(wide),
            "perplexity_ratio": result.model.perplexity / wide.perplexity,
        }
    return {**figures.pop("model"), **figures}


def perplexity_table(results: Mapping[str, PerplexityResult], *, model: str, data: str) -> Table:
    """The model in each of the formats that `results` names, beside the two baselines.

    Where there are two, the second is what the first was quantized from.
    """
    result, *others = results.values()
    caption = (
        f"{result.num_tokens:,} tokens, {result.num_bytes:,} bytes of "
        f"{result.num_documents:,} documents. Unigram: each token by its frequency in this text."
    )
    rows = {f"{model}, {name}": each.model for name, each in results.items()} | result.baselines
    if others:
        ratio = result.model.perplexity / others[0].model.perplexity
        caption += f" Quantized: {ratio:.4f} x the perplexity of {list(results)[1]}."
    table = Table(
        title=f"Perplexity on {data}",
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", overflow="fold")
    for name in ("perplexity", "bits per byte", "nats per token"):
        table.add_column(name, justify="right")
    error = result.perplexity_standard_error
    for name, score in rows.items():
        spread = f" ± {error:,.2f}" if score is result.model and error is not None else ""
        table.add_row(
            name,
            f"{score.perplexity:,.2f}{spread}",
            f"{score.bits_per_byte:.4f}",
            f"{score.loss:.4f}",
            style="bold" if score is result.model else "",
        )
    return table
