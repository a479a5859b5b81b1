"""herder generate: continue one prompt, here and now. Composition only."""

from __future__ import annotations

import json
import time

import click

from herder.cli.models import resolve, tokenizer_folder
from herder.data.tokenizer import load_tokenizer
from herder.engine.engine import Engine
from herder.engine.request import (
    Finished,
    Limits,
    Request,
    SamplingParams,
    TokenMade,
    check_request,
)
from herder.serve.load import DTYPES, load_runner, window_tokens


@click.command("generate")
@click.argument("model")
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
@click.option("--precision", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
def command(
    model: str, prompt: str, *, as_chat: bool, precision: str, as_json: bool, **sampling: object
) -> None:
    """Continue a prompt with MODEL; text goes to stdout as it comes, figures to stderr."""
    params = SamplingParams(**sampling)
    source = resolve(model)
    tokenizer = load_tokenizer(tokenizer_folder(source))
    if as_chat:
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    else:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
    decoder = tokenizer.detokenizer(context=() if as_chat else prompt_ids)
    request = Request(prompt_ids, params, decoder)
    check_request(request, Limits(window_tokens(source, None), source.architecture.vocab_size))
    needed = len(prompt_ids) + (params.max_tokens or 0)
    runner = load_runner(source, tokenizer, precision=precision, window_tokens=needed)
    pieces: list[str] = []
    times: list[float] = []
    with Engine(runner) as engine:
        for event in engine.submit(request).events():
            if isinstance(event, (TokenMade, Finished)):
                pieces.append(event.text)
                times.append(time.monotonic())
                click.echo("" if as_json else event.text, nl=False)
    assert isinstance(event, Finished), event
    if event.error is not None:
        raise event.error
    after_first = event.num_completion_tokens - 1
    # The last two events share a moment: the last token and the end.
    speed = after_first / (times[-1] - times[0]) if after_first > 0 else None
    if as_json:
        report = {
            "model": source.name,
            "text": "".join(pieces),
            "finish_reason": event.reason,
            "prompt_tokens": event.num_prompt_tokens,
            "completion_tokens": event.num_completion_tokens,
            "tokens_per_second": speed,
        }
        click.echo(json.dumps(report, ensure_ascii=False, allow_nan=False))
        return
    hint = "" if as_chat or not tokenizer.has_chat_template else "; --chat asks it as a chat"
    pace = "" if speed is None else f", {speed:.1f} tokens/s"
    click.echo(
        f"\n[{event.num_prompt_tokens} prompt tokens, {event.num_completion_tokens} new{pace}, "
        f"finish reason {event.reason}{hint}]",
        err=True,
    )
