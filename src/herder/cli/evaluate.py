"""`herder evaluate`: how good a model is. Composition only."""

from __future__ import annotations

import json

import click
from rich.console import Console

from herder.cli.models import resolve, tokenizer_folder
from herder.cli.overrides import architecture_option, overridden
from herder.data.progress import progress
from herder.data.tokenizer import check_vocabulary, load_tokenizer
from herder.errors import ConfigError, close_match
from herder.evaluate.model import Precision, Split, data_of, load_model, texts_of, window_tokens
from herder.evaluate.perplexity import encode_for_scoring, evaluate_perplexity
from herder.evaluate.tables import perplexity_json, perplexity_table

TASKS = ("perplexity",)
_POSITIVE = click.IntRange(min=1)


@click.command("evaluate")
@click.argument("model")
@architecture_option
@click.option("--tasks", default="perplexity", help="Comma-separated. Known: perplexity.")
@click.option("--data", help="A corpus by name or path. Default: a run's own, wikipedia-leads.")
@click.option("--text-key", help="Which key of a JSON object holds the text.")
@click.option(
    "--split",
    type=click.Choice(["validation", "all"]),
    default="validation",
    show_default=True,
    help="The documents that training holds out (one in 50 by default), or all.",
)
@click.option("--max-tokens", type=_POSITIVE, default=65_536, show_default=True)
@click.option("--sequence-length", type=_POSITIVE, help="Cut here. Default: the model's window.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    overrides: tuple[str, ...],
    tasks: str,
    data: str | None,
    text_key: str | None,
    split: Split,
    max_tokens: int,
    sequence_length: int | None,
    precision: Precision,
    as_json: bool,
) -> None:
    """Perplexity and bits per byte of MODEL on held-out text, beside what knowing nothing gives."""
    for task in tasks.split(","):
        if task not in TASKS:
            raise ConfigError(f"--tasks: unknown task {task!r}. {close_match(task, TASKS)}")
    source = overridden(resolve(model), overrides)
    window = window_tokens(source, sequence_length)
    tokenizer = load_tokenizer(tokenizer_folder(source))
    check_vocabulary(tokenizer, vocab_size=source.architecture.vocab_size, model=source.name)
    given = {"source": data, "text_key": text_key}
    config = data_of(source).model_copy(update={k: v for k, v in given.items() if v is not None})
    texts = texts_of(config, split=split)
    documents = encode_for_scoring(tokenizer, texts, max_tokens=max_tokens)
    decoder = load_model(source, precision=precision)
    with progress(
        f"evaluating {source.name}", documents.num_tokens - documents.num_documents
    ) as show:
        result = evaluate_perplexity(decoder, documents, window_tokens=window, on_progress=show)
    if as_json:
        settings = {"data": config.source, "split": split, "precision": precision}
        click.echo(json.dumps({"model": source.name, **settings, **perplexity_json(result)}))
    else:
        label = f"{config.source} ({'held out' if split == 'validation' else 'all documents'})"
        Console().print(perplexity_table(result, model=source.name, data=label))
