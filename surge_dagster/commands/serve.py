"""The command that answers queries and documents over HTTP."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from surge_dagster.commands.settings import Yes, space_to_read, takes_settings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.terminal import messages, terminable

Host = Annotated[
    str,
    typer.Option(help="Address to listen on; one that other machines reach needs --api-keys."),
]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 is a free one.", min=0, max=65535)]
UnixSocket = Annotated[
    Path | None,
    typer.Option(help="Unix socket to listen on, in place of --host and --port.", metavar="PATH"),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(help="File with the SHA-256 of an API key, in hex, in each line.", metavar="FILE"),
]
PromiseMs = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds within which an accepted query is answered. Default: what the model "
        "needs."
    ),
]
Batches = Annotated[
    Path | None,
    typer.Option(help="Folder for files and batches; without it there are none.", metavar="FOLDER"),
]


@takes_settings("output", "model", "trust_remote_code", "devices", "precision")
def serve(
    settings: Settings,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    uds: UnixSocket = None,
    api_keys: ApiKeys = None,
    promise_ms: PromiseMs = None,
    batches: Batches = None,
    yes: Yes = False,
) -> None:
    """Answer queries over HTTP within a promised time, in the output's current space, as OpenAI's
    API does.

    Follows the output to another space when readers are switched to it. Ends on SIGTERM or Ctrl-C,
    when what was accepted is answered.
    """
    _require_packages()
    # a web server, and only this command needs it
    from surge_dagster.service.server import ServiceSettings, run_service
    from surge_dagster.service.spaces import LaneSettings, ServedSpaces

    store = settings.open_store()
    space_to_read(settings, store, yes=yes, described=False, queries=True)
    lanes = LaneSettings(
        devices=settings.devices,
        precision=settings.precision,
        trust_remote_code=settings.trust_remote_code,
        promised_seconds=None if promise_ms is None else promise_ms / 1000,
    )
    address = ServiceSettings(host=host, port=port, uds=uds, api_keys=api_keys, batches=batches)
    with terminable():
        try:
            run_service(ServedSpaces(store, lanes), address, partial(messages.print, markup=False))
        except KeyboardInterrupt:  # before it listened
            raise typer.Exit(130) from None


def _require_packages() -> None:
    needed = ("fastapi", "prometheus_client", "python_multipart")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"the service needs {', '.join(missing)}. Run: pip install 'surge-dagster[serve]'"
        )
