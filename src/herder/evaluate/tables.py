"""Results as a table for people and as one JSON object for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from herder.evaluate.perplexity import PerplexityResult


def perplexity_json(result: PerplexityResult) -> dict[str, Any]:
    """The result under its fields' names, the model's own score at the top."""
    figures = asdict(result)
    return {**figures.pop("model"), **figures}


def perplexity_table(result: PerplexityResult, *, model: str, data: str) -> Table:
    """The model beside the two baselines."""
    table = Table(
        title=f"Perplexity on {data}",
        caption=f"{result.num_tokens:,} tokens, {result.num_bytes:,} bytes of "
        f"{result.num_documents:,} documents. Unigram: each token by its frequency in this text.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", overflow="fold")
    for name in ("perplexity", "bits per byte", "nats per token"):
        table.add_column(name, justify="right")
    error = result.perplexity_standard_error
    for name, score in {model: result.model, **result.baselines}.items():
        spread = f" ± {error:,.2f}" if score is result.model and error is not None else ""
        table.add_row(
            name,
            f"{score.perplexity:,.2f}{spread}",
            f"{score.bits_per_byte:.4f}",
            f"{score.loss:.4f}",
            style="bold" if score is result.model else "",
        )
    return table
