"""The corpus of a recipe or run for the verbs of `herder data`. Composition only."""

from __future__ import annotations

import json

import click
from rich.console import Console

from herder.cli.models import recipe_tokenizer
from herder.config.run import RunConfig
from herder.data.corpus import TokenizedCorpus, prepare_corpus
from herder.data.inspection import summarize, summary_view
from herder.data.packing import PackedRows
from herder.data.tokenizer import Tokenizer, load_tokenizer


def prepared(config: RunConfig) -> tuple[Tokenizer, TokenizedCorpus, PackedRows]:
    """What a run reads, tokenized now if it is not yet."""
    tokenizer = load_tokenizer(recipe_tokenizer(config))
    corpus = prepare_corpus(config.data, tokenizer)
    tokens, offsets = corpus.train.tokens, corpus.train.offsets
    packed = PackedRows(tokens, offsets, sequence_length=config.train.sequence_length)
    return tokenizer, corpus, packed


def show_summary(corpus: TokenizedCorpus, packed: PackedRows, *, as_json: bool) -> None:
    """Counts, lengths and packing."""
    figures = summarize(corpus, packed)
    click.echo(json.dumps(figures)) if as_json else Console().print(summary_view(figures))
