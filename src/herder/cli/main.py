"""The `herder` command: which verbs exist, how they are found, and what an error looks like.

Owns the table of verbs, the help that teaches them, and exit statuses. It must not know what a verb
does: a verb's module is imported when it is called, so that `herder --help` and a mistyped word
answer at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from herder.errors import HerderError, UserError

QUESTIONS: dict[str, dict[str, str]] = {
    "Does it fit, how should it be split, how fast is it, what will it serve?": {
        "plan": "Memory, layout, step time and cost of training or serving.",
    },
    "Is the split right?": {
        "verify": "Train a small model of the same kind in each layout and in one process.",
    },
    "How do I train it?": {
        "data": "Bring models and texts, tokenize them, look at what a step reads.",
        "train": "Run a recipe; run it again and it goes on where it stopped.",
    },
    "What of it is saved, and is it whole?": {
        "checkpoint": "List, verify, thin out and compare the checkpoints of a run.",
    },
    "Is it any good?": {
        "evaluate": "Perplexity and bits per byte on held-out text.",
        "generate": "Continue one prompt, here and now.",
    },
    "How do I serve it?": {
        "serve": "An OpenAI-compatible HTTP server, with a page to chat.",
        "loadtest": "Time to the first token and tokens a second of any such server.",
    },
    "What happened?": {
        "report": "Where a run stands, how it ended, and which rank a hang is due to.",
    },
    "Is it still the same model elsewhere?": {
        "convert": "Hugging Face folders, GGUF files and run checkpoints into each other.",
        "parity": "Compare logits with transformers, or with stored ones.",
    },
}
"""The verbs under the question each one answers. A verb is the module `herder.cli.<verb>`."""

VERBS = tuple(verb for verbs in QUESTIONS.values() for verb in verbs)

_INTERRUPTED = 130
_PIPE_CLOSED = 1
_OF_THE_MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE),
}
"""Rights, names, full or failing disks, limits: the errors of files that are no bug of ours."""


class VerbGroup(click.Group):
    """A group whose subcommands are modules, imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(f"herder.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown verb with the nearest known ones."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            raise click.NoSuchCommand(args[0], possibilities=VERBS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs under the questions they answer, without importing them."""
        width = max(map(len, VERBS))
        for question, verbs in QUESTIONS.items():
            formatter.write_paragraph()
            formatter.write_text(question)
            with formatter.indentation():
                formatter.write_dl([(verb.ljust(width), text) for verb, text in verbs.items()])


@click.group(
    name="herder",
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="MODEL is a catalog name (llama-3.1-405b), a folder, a hub id, a .gguf file or a run"
    " directory. `herder VERB --help` explains a verb; `--json` prints one object for scripts.",
)
@click.version_option(package_name="herder", prog_name="herder")
def command() -> None:
    """One model definition, one config, one plan: from a laptop to thousands of GPUs."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; a user's error is a message on stderr.

    0 is fine, 2 a user's mistake, 1 a failed check or a reader that went away, 130 an interrupt.
    Any other exception is a bug of ours and passes through, for Python to show with its traceback.
    """
    try:
        result = command.main(arguments, prog_name="herder", standalone_mode=False)
        print(end="", flush=True)
        return result if isinstance(result, int) else 0
    except HerderError as error:
        click.echo(f"herder: {error}", err=True)
        return error.exit_status
    except click.exceptions.Abort:
        return _INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        # What is still buffered has no reader: let the interpreter flush it into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"herder: {where}{error.strerror}.", err=True)
        return UserError.exit_status


def main() -> None:
    """The entry point of the installed command.

    Records have no use for pydantic's plugins; looking for some among all that is installed would
    be a tenth of what `herder plan` takes.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.exit(run())
