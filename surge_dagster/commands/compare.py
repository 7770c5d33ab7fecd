"""The command that compares two spaces by what searches find in them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from surge_dagster.commands.settings import ENDPOINT, Yes, takes_settings
from surge_dagster.config.query_pool import query_pool
from surge_dagster.config.settings import Settings
from surge_dagster.engine.compare.comparison import SAMPLE
from surge_dagster.engine.compare.comparison import compare as compare_spaces
from surge_dagster.engine.compare.queries import read_queries
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.terminal import Json, Quiet, print_json, print_table, progress_bar

FirstName = Annotated[
    str | None, typer.Option("--space", help="Name of a space. Default: the current one.")
]
SecondName = Annotated[str, typer.Option("--with", help="Name of the space to compare it with.")]
QueriesFile = Annotated[
    Path | None,
    typer.Option("--queries", help="CSV file of queries: query, and id or partition,id."),
]
Sample = Annotated[
    int | None,
    typer.Option(help=f"Rows to draw as queries. Default: {SAMPLE}, or the file.", min=1),
]


@takes_settings("output", "model", "trust_remote_code", *ENDPOINT, "devices", "precision")
def compare(
    settings: Settings,
    second_name: SecondName,
    first_name: FirstName = None,
    queries_file: QueriesFile = None,
    sample: Sample = None,
    k: Annotated[int, typer.Option("-k", help="Rows for recall and MRR.", min=1)] = 10,
    yes: Yes = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare what searches find in two spaces: which is better if the queries have labels, else
    how much they differ."""
    if queries_file is not None and sample is not None:
        raise ConfigError("--queries and --sample were both given. Give one of them.")
    queries = sample or SAMPLE
    if queries_file is not None:
        queries = read_queries(queries_file)
    store = settings.open_store()
    first = space_of_readers(store, first_name)
    second = named_space(store, second_name)
    with progress_bar("rows", quiet=quiet) as show:
        open_pool = partial(query_pool, settings, store, yes=yes)
        found = compare_spaces(store, first, second, queries, open_pool, k=k, progress=show)
    if not quiet:
        for title, rows in found.tables().items():
            print_table(title, rows)
        print(found.in_words())
    if as_json:
        print_json(found.as_dict())
