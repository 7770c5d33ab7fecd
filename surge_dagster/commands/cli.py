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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from surge_dagster.commands.compare import compare
from surge_dagster.commands.derive import derive
from surge_dagster.commands.plan import cost_text, plan
from surge_dagster.commands.rejected import rejected
from surge_dagster.commands.serve import serve
from surge_dagster.commands.settings import (
    CATALOG,
    RUN,
    SPACE,
    SpaceName,
    Yes,
    describes_space,
    existing_space,
    recorded_source,
    space_to_read,
    start_pool,
    takes_settings,
)
from surge_dagster.commands.verify import verify
from surge_dagster.config.settings import Settings
from surge_dagster.config.settings_input import require_text
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.output.current_space import named_space, read_current
from surge_dagster.engine.output.spaces import find_space, require_model
from surge_dagster.engine.readers.search import search as search_space
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.verify.verification import switch_space
from surge_dagster.local_run import run_catalog
from surge_dagster.terminal import (
    TERMINATED_CODE,
    Json,
    Quiet,
    Terminated,
    complain,
    one_line,
    print_json,
    progress_bar,
    terminable,
)
from surge_dagster.version import __version__

app = typer.Typer(
    name="surge-dagster",
    help="Turn a partitioned catalog of texts into one embedding file per partition.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
catalog_app = typer.Typer(help="Build a catalog to try things on.", no_args_is_help=True)
app.add_typer(catalog_app, name="catalog")
app.command()(plan)
app.command()(derive)
app.command()(compare)
app.command()(serve)

# Errors of a standard output that is a closed pipe, a full disk or a lost terminal.
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@app.command()
@takes_settings("source", "output", *CATALOG, *SPACE, *RUN, "removed_partitions")
def embed(
    settings: Settings,
    force: Annotated[bool, typer.Option("--force", help="Encode fresh partitions again.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Embed what is missing or stale, without Dagster. After a crash, run it again to continue."""
    catalog = settings.open_source()
    store = settings.open_store()
    with terminable():
        try:
            ended = run_catalog(settings, catalog, store, force=force, quiet=quiet)
        except (KeyboardInterrupt, Terminated) as stopped:
            complain("stopped; what was published stays, run the command again to continue")
            raise typer.Exit(TERMINATED_CODE if isinstance(stopped, Terminated) else 130) from None
    _print_report(ended.report, ended.removed, store, quiet, as_json)
    raise typer.Exit(1 if ended.report.partitions_failed or ended.refusal else 0)


app.command()(verify)
app.command()(rejected)


@app.command()
@takes_settings("source", "output", *SPACE, *CATALOG)
def switch(
    settings: Settings,
    space_name: Annotated[
        str | None,
        typer.Option(
            "--space", help="Name of the space. Default: the one that the settings describe."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make another space the current one, if it is complete and every file in it is valid."""
    store = settings.open_store()
    space = named_space(store, space_name) if space_name else existing_space(settings, store)
    catalog = recorded_source(settings, store, space)
    switched = switch_space(catalog, store, space)
    change = "is now" if switched.changed else "was already"
    previous = switched.current.previous
    before = f"; before it, {previous}" if previous else ""
    print(f"{space.name} {change} the current space of {store.url}{before}")
    if as_json:
        print_json(asdict(switched))


@app.command()
@takes_settings("output", *SPACE, "devices")
def search(
    settings: Settings,
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="The text to search for.", metavar="TEXT")],
    k: Annotated[int, typer.Option("-k", help="Number of results.", min=1)] = 5,
    space_name: SpaceName = None,
    removed: Annotated[
        bool,
        typer.Option("--removed", help="Also search partitions removed from the source."),
    ] = False,
    documents: Annotated[
        bool,
        typer.Option("--documents", help="Print only the best chunk of each document."),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Print the texts whose vectors are nearest, equal texts once.

    Searches the current space, or the one that the options name or describe.
    """
    require_text("the text to search for", text)
    store = settings.open_store()
    given = any(context.params[name] is not None for name in SPACE)
    described = given or (describes_space(settings) and read_current(store) is None)
    space, spec = space_to_read(
        settings, store, yes=yes, name=space_name, described=described, queries=True
    )
    if not described and space_name is None and describes_space(settings):
        asked = find_space(store, settings.encoding_spec())
        if asked is None or asked.spec_sha256 != space.encoder_sha256:
            complain(f"searching the current space {space.name}, which is not that of the settings")

    with start_pool(settings, spec, task="query") as pool:
        require_model(pool.space, space)
        [hits] = search_space(store, pool, [text], k, space, removed=removed, documents=documents)
    for hit in hits:
        mark = "  (truncated: the model reads only a part)" if hit.truncated else ""
        print(f"{hit.score:.3f}  {one_line(hit.key)}  {one_line(hit.id)}{mark}")
        print(f"       {one_line(hit.text)}")
    if as_json:
        print_json({"query": text, "space": space.name, "hits": [asdict(hit) for hit in hits]})


@app.command()
def demo(
    limit: Annotated[
        int | None, typer.Option(help="About this many texts of the demo catalog.", min=1)
    ] = None,
    catalog: Annotated[str | None, typer.Option(help="Folder of the demo catalog.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder or bucket of the embeddings.")] = None,
) -> None:
    """Embed the docstrings of the installed Python packages through Dagster, and search them."""
    # Importing Dagster takes a second, and only this command needs it.
    from surge_dagster.demo import run_demo

    raise typer.Exit(run_demo(catalog=catalog, output=output, limit=limit))


@catalog_app.command("demo")
def catalog_demo(
    out: Annotated[Path, typer.Option(help="Folder of the catalog.")],
    limit: Annotated[int | None, typer.Option(help="About this many texts.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Build a catalog from the docstrings of the installed packages, one partition per package."""
    from surge_dagster.catalogs.demo import build_demo_catalog

    with progress_bar("bytes of sources") as report:
        summary = build_demo_catalog(out, limit=limit, progress=report)

    print(f"{counted(summary.partitions, 'partition')}, {counted(summary.texts, 'text')} in {out}")
    if as_json:
        print_json(asdict(summary) | {"out": str(out)})


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


def _print_report(
    report: RunReport, removed: Sequence[str], store: Store, quiet: bool, as_json: bool
) -> None:
    if not quiet:
        line = (
            f"{counted(report.partitions_written, 'partition')} written, "
            f"{report.partitions_skipped:,} fresh, {len(report.partitions_failed):,} failed"
        )
        if removed:
            line += f", {len(removed):,} removed from the source"
        print(f"{line}; {_encoded_in_words(report)}")
        print(f"files are in {store.location(report.space)}")
        cost = report.cost
        if cost is not None:
            print(f"cost {cost_text(cost, report.prices, report.cost_per_million_texts)}")
    if as_json:
        print_json(report.as_dict() | {"partitions_removed": removed})


def _encoded_in_words(report: RunReport) -> str:
    if not report.device:
        return "there was nothing to encode"
    speed = f"{report.texts_per_second:,.0f} texts/s"
    if report.predicted_wall_seconds is not None:
        speed += f"; {report.predicted_wall_seconds:.1f} s were predicted"
    parts = [
        f"{counted(report.texts_encoded, 'text')} encoded in {report.wall_seconds:.1f} s "
        f"({speed}) on {report.device} in {report.precision}"
    ]
    if report.costs.rows_reused:
        parts.append(f"{report.costs.rows_reused:,} kept their vectors")
    if report.costs.texts_deduplicated:
        parts.append(f"{report.costs.texts_deduplicated:,} equal to another text")
    parts.append(f"{report.truncated:,} truncated")
    if report.rejected_rows:
        parts.append(f"{counted(report.rejected_rows, 'row')} set aside")
    return ", ".join(parts)
