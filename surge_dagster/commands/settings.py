"""The options of commands that set a setting, made from `Settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from surge_dagster.config.catalog_settings import CatalogSettings
from surge_dagster.config.settings import EncoderSettings, FileSettings, Settings, load_settings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.tables.column_settings import FileColumnSettings
from surge_dagster.terminal import messages

# Settings that commands take, in the order in which their help lists them.
CATALOG = tuple(CatalogSettings.model_fields)
SPACE = (*(field.name for field in fields(EncodingSpec)), "precision")
RUN = tuple(
    name
    for name in (*EncoderSettings.model_fields, *FileSettings.model_fields)
    if name not in SPACE
)
_ARGUMENTS = ("source", "output")
# The groups of options in the help of a command, in addition to its own.
_GROUPS = {
    "Texts": tuple(FileColumnSettings.__annotations__),
    "Catalog": CATALOG,
    "Model": SPACE,
    "Output files": tuple(FileSettings.model_fields),
    "Run": RUN,
}


def takes_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option (or argument) for each of these settings.

    The command's first parameter is the resulting `Settings`. Options that are not given come from
    the environment and the file.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in names}
            command(load_settings(**chosen), **given)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in own]
        for name in names:
            option = _option(name)
            parameters.append(inspect.Parameter(name, keyword, default=None, annotation=option))
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


def _option(name: str) -> Any:
    """Return typer's annotation for the option of a setting; `Settings` validates the value."""
    field = Settings.model_fields[name]
    kinds = {field.annotation, *get_args(field.annotation)}
    kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
    group = next((group for group, names in _GROUPS.items() if name in names), None)
    info = typer.Argument if name in _ARGUMENTS else typer.Option
    return Annotated[kind | None, info(help=_help(name), rich_help_panel=group)]


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    described = field.description or name
    default = "" if field.default in (None, []) else f" Default: {field.default}."
    return f"{described[0].upper()}{described[1:]}.{default}"


def start_pool(
    settings: Settings, spec: EncodingSpec | None = None, task: Task = "document"
) -> EncoderPool:
    spec = spec or settings.encoding_spec()
    pool = settings.encoder_pool(spec, task)
    with messages.status(f"starting the encoder for {spec.model}"):
        pool.start()
    return pool
