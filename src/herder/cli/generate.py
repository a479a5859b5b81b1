"""herder generate: continue one prompt, here and now. Composition only."""

from __future__ import annotations

import json

import click

from herder.cli.models import resolve, tokenizer_folder
from herder.cli.overrides import architecture_option, overridden
from herder.cli.quantization import quantization_options
from herder.config.quantization import GroupSize, QuantizationName, weight_quantization
from herder.data.tokenizer import load_tokenizer
from herder.engine.request import SamplingParams
from herder.serve.load import DTYPES
from herder.serve.once import answer_once, prompt_request


@click.command("generate")
@click.argument("model")
@architecture_option
@click.option("--prompt", required=True, help="The text to continue, or with --chat to answer.")
@click.option(
    "--chat/--raw",
    "as_chat",
    help="Whether the prompt is a user's message, put into the model's chat template, or text as "
    "it is.  [default: raw]",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: all tokens.")
@click.option("--seed", type=int, help="Same seed, same text.  [default: another each time]")
@click.option(
    "--precision",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="auto: bf16, but fp32 on GPUs without it.",
)
@quantization_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
def command(
    model: str,
    overrides: tuple[str, ...],
    prompt: str,
    *,
    as_chat: bool,
    precision: str,
    quantization: QuantizationName | None,
    quantization_group_size: GroupSize | None,
    as_json: bool,
    **sampling: object,
) -> None:
    """Continue a prompt with MODEL; text goes to stdout as it comes, figures to stderr."""
    params = SamplingParams(**sampling)
    source = overridden(resolve(model), overrides)
    tokenizer = load_tokenizer(tokenizer_folder(source))
    request = prompt_request(tokenizer, prompt, params, as_chat=as_chat)

    def show(text: str) -> None:
        click.echo("" if as_json else text, nl=False)

    how = weight_quantization(quantization, quantization_group_size)
    precise = {"precision": precision, "quantization": how}
    report = answer_once(source, tokenizer, request, **precise, on_text=show)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False, allow_nan=False))
        return
    click.echo()
    speed = report["tokens_per_second"]
    pace = "" if speed is None else f", {speed:.1f} tokens/s"
    is_chat_model = tokenizer.has_chat_template and not as_chat
    hint = "; --chat asks it as a chat" if is_chat_model else ""
    click.echo(
        f"[{report['prompt_tokens']} prompt tokens, {report['completion_tokens']} new{pace}, "
        f"finish reason {report['finish_reason']}{hint}]",
        err=True,
    )
