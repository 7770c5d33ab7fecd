"""Reading published files: in full beside their sources before they are adopted, their footers at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.report import Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.concurrent_reads import read_concurrently
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify import Violation, verify_partition

_ENCODE_AGAIN = "Run again: it is encoded again."
_FORCE = "Launch this partition with force: true."


def read_back(
    partitions: Sequence[Partition], store: Store, space: Space
) -> Iterator[tuple[str, Failure | TransientError | None]]:
    """Read files in full beside their sources, those of a bucket concurrently.

    Yields:
        A partition's key with its failure, or with the error where its file cannot be read now; None if it is sound.

    Raises:
        StoreUnavailable: the store is down.
    """
    by_key = {partition.key: partition for partition in partitions}
    down: list[StoreUnavailable] = []

    def read(store: Store, key: str) -> Failure | TransientError | None:
        if down:
            raise down[0]  # each further file would wait for the store again
        try:
            return file_failure(by_key[key], store, space)
        except StoreUnavailable as error:
            down.append(error)
            raise
        except TransientError as error:
            return error

    if not store.is_remote:
        yield from ((key, read(store, key)) for key in by_key)
        return
    answers: dict[str, Failure | TransientError | None] = {}
    read_concurrently(store, list(by_key), read, answers.__setitem__)
    yield from answers.items()


def file_failure(partition: Partition, store: Store, space: Space) -> Failure | None:
    """Why a partition's file is not what its source says it must be, row by row; None when it is.

    A file that another attempt at encoding will replace is a transient failure; a source whose rows are refused is
    not. A source that has changed since it was listed proves nothing: the next run will look at it.

    Raises:
        TransientError: the source or the output does not answer.
    """
    found = verify_partition(partition, store, space)
    if not isinstance(found, Violation) or partition.current_source_version() != partition.source_version:
        return None
    if found.kind == "unread":
        raise TransientError(found.finding, partition.key)
    if found.kind == "source":
        return Failure(partition.key, found.reason, remedy=found.remedy)
    return _failure(partition.key, found.finding, _ENCODE_AGAIN, transient=True)


def footer_failures(
    outputs: OutputState, rows: Mapping[str, int], partitions: Mapping[str, Partition], dimension: int
) -> Iterator[Failure]:
    """Compare the footers of files that a run has just published with what they must hold.

    Args:
        outputs: the files of the run's space; they are listed anew.
        rows: texts that were encoded, by partition key of the catalog.
        partitions: of the catalog, by key.
        dimension: of the space.

    Raises:
        StoreUnavailable: the store is down.
    """
    outputs.refresh()
    outputs.look_at(rows)
    for key, encoded in rows.items():
        try:
            file = outputs.file(key)
        except StoreUnavailable:
            raise
        except TransientError as error:
            yield unanswered(key, error)
            continue
        partition = partitions[key]
        if file is None:
            yield _failure(key, "its published file is missing or damaged.", _ENCODE_AGAIN, transient=True)
            continue
        facts = file.facts
        if facts.source_version != partition.source_version:
            continue  # another writer has published a newer source since
        expected = encoded if partition.rows is None else partition.rows
        if facts.rows != expected:
            yield _failure(key, f"its file has {facts.rows:,} rows; its source has {expected:,}.", _FORCE)
        elif facts.space != outputs.space or facts.dimension != dimension:
            finding = f"its file holds vectors of {facts.dimension} numbers of the space {facts.space!r}; expected "
            yield _failure(key, f"{finding}{dimension} numbers of the space {outputs.space!r}.", _FORCE)


def unanswered(key: str, error: TransientError) -> Failure:
    """A partition's failure where the store does not give its file now."""
    return Failure(key, str(error), transient=True)


def _failure(key: str, finding: str, remedy: str, *, transient: bool = False) -> Failure:
    return Failure(key, f"partition {key!r}: {finding} {remedy}", transient, remedy, in_source=False)
