"""Reading published files: in full beside their sources before they are adopted, their footers at
the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.concurrent_reads import reads_ahead
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.verification import Violation, verify_partition
from surge_dagster.orchestration.footer_checks import FooterChecks

_ENCODE_AGAIN = "Run again: it is encoded again."
_MOVE_AWAY = "Move the file away and run again."


def read_back(
    partitions: Sequence[Partition], store: Store, space: Space
) -> dict[str, str | Failure | None]:
    """Read files in full beside their sources; by key: None if sound, how it differs, or a failure
    to read it."""
    by_key = {partition.key: partition for partition in partitions}

    def read(store: Store, key: str) -> str | Failure | None:
        try:
            return difference(by_key[key], store, space)
        except StoreUnavailable:
            raise  # each further file would wait for the store again
        except TransientError as error:
            return unreadable(key, error)

    return dict(zip(by_key, reads_ahead(store, list(by_key), read), strict=True))


def difference(partition: Partition, store: Store, space: Space) -> str | None:
    """How a partition's file differs from its source, row by row; None when it does not."""
    verified = verify_partition(partition, store, space)
    # A source that has changed since it was listed proves nothing: the next run will read it.
    if (
        not isinstance(verified, Violation)
        or partition.current_source_version() != partition.source_version
    ):
        return None
    if verified.kind == "unread":
        raise TransientError(verified.finding, partition.key)
    return f"partition {partition.key!r}: {verified.finding}"


def footer_failures(
    outputs: OutputState,
    rows: Mapping[str, int],
    partitions: Mapping[str, Partition],
    space: Space,
    checks: FooterChecks,
) -> Iterator[Failure]:
    """Judge the footers of files that a run has published or found fresh, and yield what is wrong
    with them.

    Args:
        rows: of each file, by catalog key.
    """
    outputs.refresh()
    outputs.look_at(rows)
    for key, published_rows in rows.items():
        partition = partitions[key]
        freshness = outputs.freshness(partition)
        violation = checks.record(partition, freshness, space, published_rows)
        file = freshness.file
        if freshness.error is not None:
            yield unreadable(key, freshness.error)
        elif violation is not None:
            yield _failure(key, violation, _ENCODE_AGAIN)
        elif file is None:
            yield _failure(
                key, "its published file is missing or damaged.", _ENCODE_AGAIN, transient=True
            )
        elif freshness.status == "foreign":
            finding = f"its file holds vectors of the space {file.facts.space!r}; expected {outputs.space!r}."
            yield _failure(key, finding, _MOVE_AWAY)
        # Another writer has published the file of a newer source if the status is "stale".


def unreadable(key: str, error: TransientError) -> Failure:
    return Failure(key, str(error), transient=True)


def _failure(key: str, finding: str, remedy: str, *, transient: bool = False) -> Failure:
    return Failure(
        key, f"partition {key!r}: {finding} {remedy}", transient, remedy, in_source=False
    )
