"""herder serve: one model behind the OpenAI API. Composition only."""

from __future__ import annotations

import logging
from typing import Any

import click

from herder.cli.engine_options import engine_options
from herder.cli.models import resolve, tokenizer_folder
from herder.cli.overrides import architecture_option, overridden
from herder.config.run import ServeConfig
from herder.serve.app import create_app
from herder.serve.load import DTYPES, banner, load_service, window_tokens
from herder.serve.server import Host, Server, bind, url_of

_DEFAULTS = ServeConfig()


@click.command("serve")
@click.argument("model")
@architecture_option
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=_DEFAULTS.port,
    show_default=True,
    help="0: any free port, printed.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    help="Longest prompt plus answer, in tokens.  [default: the model's window]",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", *DTYPES]),
    default=_DEFAULTS.precision,
    show_default=True,
    help="Of weights, activations and cache. auto: bf16, but fp32 on GPUs without it.",
)
@click.option(
    "--max-queued-requests",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_queued_requests,
    show_default=True,
    help="Further requests get status 429.",
)
@engine_options
def command(model: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Serve MODEL over HTTP: /v1/completions, /v1/chat/completions and the rest of the OpenAI API.

    SIGTERM or Ctrl-C ends it once the accepted requests are answered; a second one ends it at once.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = ServeConfig(**options)
    source = overridden(resolve(model), overrides)
    folder = tokenizer_folder(source)
    window_tokens(source, config.max_model_len)
    bound = bind(config.host, config.port)
    served = Host(lambda: load_service(source, folder, config))
    click.echo(f"loading {source.name}", err=True)
    server = Server(
        create_app(served),
        served,
        bound,
        on_ready=lambda: click.echo(banner(served.service(), config, url_of(bound))),
    )
    server.serve_until_stopped()
