"""herder serve: one model behind the OpenAI API. Composition only."""

from __future__ import annotations

import logging
from typing import Any

import click

from herder.cli.engine_options import engine_options
from herder.cli.models import resolve, tokenizer_folder
from herder.cli.overrides import architecture_option, overridden
from herder.cli.quantization import quantization_options
from herder.cli.serve_options import serve_options
from herder.config.run import ServeConfig
from herder.serve.app import create_app
from herder.serve.load import banner, load_service, window_tokens
from herder.serve.server import Host, Server, bind, url_of


@click.command("serve")
@click.argument("model")
@architecture_option
@quantization_options
@serve_options
@engine_options
def command(
    model: str,
    overrides: tuple[str, ...],
    max_body_bytes: int,
    api_key: str | None,
    **options: Any,
) -> None:
    """Serve MODEL over HTTP: the OpenAI API under /v1, and a page to chat with it at /.

    SIGTERM or Ctrl-C ends it once the accepted requests are answered; a second one ends it at once.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = ServeConfig(**options)
    source = overridden(resolve(model), overrides)
    folder = tokenizer_folder(source)
    window_tokens(source, config.max_model_len)
    served = Host(lambda: load_service(source, folder, config))
    app = create_app(served, max_body_bytes=max_body_bytes, api_key=api_key)
    bound = bind(config.host, config.port)
    click.echo(f"loading {source.name}", err=True)
    server = Server(
        app,
        served,
        bound,
        on_ready=lambda: click.echo(banner(served.service(), config, url_of(bound))),
    )
    server.serve_until_stopped()
