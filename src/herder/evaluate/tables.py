"""Results as a table for people and as one JSON object for scripts."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from herder.evaluate.perplexity import PerplexityResult, Score


def perplexity_json(result: PerplexityResult) -> dict[str, Any]:
    """The result under its fields' names, the model's own score at the top."""
    return {
        **_score_json(result.model),
        "loss_standard_error": result.loss_standard_error,
        "perplexity_standard_error": result.perplexity_standard_error,
        "num_tokens": result.num_tokens,
        "num_bytes": result.num_bytes,
        "num_documents": result.num_documents,
        "baselines": {
            "unigram": _score_json(result.unigram),
            "uniform": _score_json(result.uniform),
        },
    }


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
    spread = "" if error is None else f" ± {error:,.2f}"
    _add_row(table, model, result.model, spread=spread, style="bold")
    _add_row(table, "unigram", result.unigram)
    _add_row(table, "uniform", result.uniform)
    return table


def _add_row(table: Table, name: str, score: Score, *, spread: str = "", style: str = "") -> None:
    table.add_row(
        name,
        f"{score.perplexity:,.2f}{spread}",
        f"{score.bits_per_byte:.4f}",
        f"{score.loss:.4f}",
        style=style,
    )


def _score_json(score: Score) -> dict[str, float]:
    return {
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "loss": score.loss,
    }
