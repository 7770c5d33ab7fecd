"""What commands read: options made from `Settings`, and the space and source that these name, else
as recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from surge_dagster.config.catalog_settings import CatalogSettings
from surge_dagster.config.endpoint_settings import EndpointSettings
from surge_dagster.config.query_pool import spec_to_load
from surge_dagster.config.settings import EncoderSettings, FileSettings, Settings, load_settings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.current_space import read_current, space_of_readers
from surge_dagster.engine.output.spaces import (
    find_space,
    list_spaces,
    nearest_spaces,
    recorded_catalog,
    space_of_spec,
)
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.sources.selection import FileColumnSettings
from surge_dagster.engine.store.store import Store
from surge_dagster.terminal import complain, messages

# Settings that commands take, in the order in which their help lists them.
CATALOG = tuple(CatalogSettings.model_fields)
_OF_SPEC = tuple(field.name for field in fields(EncodingSpec))
_MODEL = (*(name for name in _OF_SPEC if name in EncoderSettings.model_fields), "precision")
ENDPOINT = tuple(EndpointSettings.model_fields)
SPACE = (*_MODEL, *ENDPOINT)
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
    "Model": _MODEL,
    "Encoder behind HTTP": ENDPOINT,
    "Output files": tuple(FileSettings.model_fields),
    "Run": RUN,
}

SpaceName = Annotated[
    str | None, typer.Option("--space", help="Name of the space, derived ones too.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Load the model that only the output names.")]


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


def existing_space(settings: Settings, store: Store) -> Space:
    spec = settings.encoding_spec()
    space = find_space(store, spec)
    if space is not None:
        return space
    expected = spec.resolve()
    space = space_of_spec(store, expected.spec_sha256)
    if space is not None:
        return space
    # made with other prompts of the same model in a folder
    before = find_space(store, expected.requested)
    if before is not None and before.model_digest == expected.model_digest:
        return before
    held = nearest_spaces(spec, [each for each in list_spaces(store) if not each.derived])
    if not held:
        raise ConfigError(
            f"the output {store.url!r} holds no embeddings. Run `surge-dagster embed` first, or "
            "give another output."
        )
    raise ConfigError(
        f"the output {store.url!r} has no embeddings of the space {expected.name}; it holds "
        f"{held}. Give the settings of one of these, or its name (--space), or run "
        "`surge-dagster embed` first."
    )


def recorded_source(settings: Settings, store: Store, space: Space) -> Source:
    """Open the source as the last run of the space did; complain if it is another catalog."""
    recorded = recorded_catalog(store, space)
    settings = settings.as_recorded(recorded)
    given = settings.record(settings.source).for_output(store)
    if recorded is not None and not given.is_same(recorded):
        complain(
            f"the space {space.name} holds the catalog {recorded.shown!r}, and {given.shown!r} is "
            "read"
        )
    return settings.open_source(settings.reaching(space.loadable))


def describes_space(settings: Settings) -> bool:
    return not settings.model_fields_set.isdisjoint(SPACE)


def space_to_read(
    settings: Settings,
    store: Store,
    *,
    yes: bool,
    name: str | None = None,
    described: bool | None = None,
    queries: bool = False,
) -> tuple[Space, EncodingSpec]:
    """Return a space and the spec that loads its model.

    The space is that of the name, else of the settings, else the current one, else the only one.
    A model that only the output names is loaded only with `--yes`: somebody else may have written
    it.

    Args:
        described: whether the settings choose the space; None: if they contain one of `SPACE`.
        queries: whether the model encodes queries; documents of a derived space need no model.
    """
    if described is None:
        described = describes_space(settings)
    spec = settings.encoding_spec()
    if described and name is None:
        space = existing_space(settings, store)
        return space, space.loadable_from(spec)
    if name is None and read_current(store) is None and (space := find_space(store, spec)):
        return space, space.loadable_from(spec)
    space = space_of_readers(store, name)
    if space.derived and not queries:  # its vectors are computed without a model
        return space, space.loadable
    return space, spec_to_load(settings, store, space, yes=yes)
