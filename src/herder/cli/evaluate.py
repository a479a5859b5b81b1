"""`herder evaluate`: how good a model is. Composition only."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console

from herder.cli.models import resolve, tokenizer_folder
from herder.cli.overrides import architecture_option, overridden
from herder.cli.quantization import quantization_options
from herder.config.quantization import weight_quantization
from herder.data.tokenizer import check_vocabulary, load_tokenizer
from herder.errors import ConfigError, close_match
from herder.evaluate.formats import score_formats
from herder.evaluate.model import Split, data_of, texts_of, window_tokens
from herder.evaluate.perplexity import encode_for_scoring
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
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16"]), help="[default: fp32; bf16 if quantized]"
)
@quantization_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    overrides: tuple[str, ...],
    tasks: str,
    split: Split,
    max_tokens: int,
    sequence_length: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Perplexity and bits per byte of MODEL on held-out text, beside what knowing nothing gives.

    With --quantization also as it is without, and their ratio.
    """
    for task in tasks.split(","):
        if task not in TASKS:
            raise ConfigError(f"--tasks: unknown task {task!r}. {close_match(task, TASKS)}")
    source = overridden(resolve(model), overrides)
    window = window_tokens(source, sequence_length)
    tokenizer = load_tokenizer(tokenizer_folder(source))
    check_vocabulary(tokenizer, vocab_size=source.architecture.vocab_size, model=source.name)
    how = weight_quantization(given["quantization"], given["quantization_group_size"])
    precision = given["precision"] or ("fp32" if how is None else "bf16")
    chosen = {"source": given["data"], "text_key": given["text_key"]}
    config = data_of(source).model_copy(update={k: v for k, v in chosen.items() if v is not None})
    texts = texts_of(config, split=split)
    documents = encode_for_scoring(tokenizer, texts, max_tokens=max_tokens)
    results = score_formats(source, documents, how, precision=precision, window_tokens=window)
    if as_json:
        settings = {"data": config.source, "split": split, "precision": precision}
        click.echo(json.dumps({"model": source.name, **settings, **perplexity_json(results)}))
    else:
        label = f"{config.source} ({'held out' if split == 'validation' else 'all documents'})"
        Console().print(perplexity_table(results, model=source.name, data=label))
