"""The command line: each command reads settings, makes one engine call and prints the result.

Exit codes: 0 done, 1 something is wrong with the data or the run, 2 wrong usage (a setting, a path,
a model). With `--json` the last line of standard output is one JSON document, with `error` for an
error; progress and messages go to standard error.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.terminal import TERMINATED_CODE, Terminated, complain, print_json
from surge_dagster.version import __version__

# Each is a function, or an app with commands of its own, in the module of the same name.
COMMANDS = {
    "embed": "Embed what is missing or stale, without Dagster.",
    "plan": "Predict what a run takes.",
    "verify": "Prove that every partition has a file with its rows, each with its own vector.",
    "search": "Print the texts whose vectors are nearest.",
    "rejected": "Print the bad rows that were set aside.",
    "compare": "Compare what searches find in two spaces.",
    "derive": "Compute smaller vectors from the files of a space, without its model.",
    "switch": "Make another space the current one.",
    "serve": "Answer queries over HTTP, as OpenAI's API does.",
    "demo": "Embed the docstrings of this machine's Python packages through Dagster.",
    "catalog": "Build a catalog to try things on.",
}
_OPTIONS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}

# Errors of a standard output that is a closed pipe, a full disk or a lost terminal.
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Commands(TyperGroup):
    """Imports a command when it is called; to list all of them takes nothing of the engine."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.add_command(command_of(args[0]), args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="surge-dagster",
    cls=_Commands,
    help="Turn a partitioned catalog of texts into one embedding file per partition.",
    no_args_is_help=True,
    **_OPTIONS,
)


def command_of(name: str) -> Any:
    """Return one of `COMMANDS` as click's command, with its options."""
    command = getattr(import_module(f"surge_dagster.commands.{name}"), name)
    if not isinstance(command, typer.Typer):
        only = typer.Typer(**_OPTIONS)
        only.command(name)(command)
        command = only
    return typer.main.get_command(command)


@app.callback(invoke_without_command=True)
def _global(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what the encoder pool does.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    if version:
        print(f"surge-dagster {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit(2)


def main() -> None:
    """Run the command line and turn errors into a message and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Data has characters that the terminal's encoding may lack.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run_app()
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        # What is buffered would fail once more at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader of our output: `… | head`
            complain(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(1)


def _run_app() -> None:
    try:
        app(prog_name="surge-dagster")
    except SurgeError as error:
        complain(f"error: {error}")
        if "--json" in sys.argv:
            print_json({"error": str(error)})
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except Terminated:  # before there was anything to publish
        sys.exit(TERMINATED_CODE)
    except SystemExit as end:
        if sys.stdout is not None:
            sys.stdout.flush()
        # a store that does not answer must not keep a stopped process alive
        if end.code in (130, TERMINATED_CODE):
            os._exit(int(end.code))
        raise
