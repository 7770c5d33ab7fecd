"""What a run finds before it encodes anything: files that are up to date, and partitions that are left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import dagster as dg

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.launch import LaunchConfig
from surge_dagster.orchestration.lineage import Catalogued
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outputs import published
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.read_back import Found, ReadBack, unanswered
from surge_dagster.orchestration.resumed import done_before
from surge_dagster.orchestration.selection import Select, failed_on_record

# A check lists more of them; a log line costs as much as an event.
FAILURES_LOGGED = 100


@dataclass(slots=True)
class Surveyed:
    """Partitions by what a run has to do with them.

    Attributes:
        fresh: receipts of files that stay as they are.
        todo: what is selected and needs work.
        unreadable: those of which nobody can tell now.
    """

    fresh: list[Receipt] = field(default_factory=list)
    todo: list[Partition] = field(default_factory=list)
    unreadable: list[Failure] = field(default_factory=list)


class Survey:
    """Looks at the files of the partitions that a run was launched for.

    Args:
        names: of the catalog.
        context: of the op.
        config: what the run was told at its launch.
        store: where the files are.
        catalogued: what Dagster has on record, which the run keeps up to date.

    Attributes:
        sound: keys of up-to-date files that are not on record and were read back.
        damaged: keys of such files that are not what their source says; they are encoded again.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        config: LaunchConfig,
        store: Store,
        catalogued: Catalogued,
    ) -> None:
        self._names = names
        self._context = context
        self._config = config
        self._store = store
        self._catalogued = catalogued
        self.sound: set[str] = set()
        self.damaged: set[str] = set()

    def look(self, candidates: Sequence[Partition], space: Space | None) -> Surveyed:
        """Tell what is done from what is left.

        Args:
            space: of the run, None where the output has none yet.

        Raises:
            StoreUnavailable: the store is down.
        """
        select = self._config.select
        outputs = OutputState(self._store, space.name, space.file_format) if space else None
        failed = self._shown_as_failed if select is Select.failed else set[str]()
        done = done_before(self._names, self._context) if self._config.force else set[str]()
        found = Surveyed()
        self.sound.clear()  # of another space
        self.damaged.clear()
        files: list[tuple[Partition, Receipt | None, bool]] = []  # and whether the partition's state is selected
        for partition in outputs.looked_at(candidates) if outputs else candidates:
            partition_key = to_partition_key(partition.key)
            try:
                status = outputs.status(partition) if outputs else "missing"
                selected = select.takes(status, partition_key in failed)
                again = self._config.force and selected and partition_key not in done
                receipt = published(outputs, partition.key) if outputs and status == "fresh" and not again else None
            except StoreUnavailable:
                raise  # of every partition, and each would wait for it anew
            except TransientError as error:
                found.unreadable.append(unanswered(partition.key, error))
                continue
            files.append((partition, receipt, selected))
        silent = self._read_back(files, space) if space else {}
        found.unreadable += silent.values()
        for partition, receipt, selected in files:
            if partition.key in silent:
                continue
            if partition.key in self.damaged:
                receipt, selected = None, select.takes("missing", to_partition_key(partition.key) in failed)
            if receipt:
                found.fresh.append(receipt)
            elif selected:
                found.todo.append(partition)
        return found

    def is_on_record(self, receipt: Receipt, partition: Partition | None) -> bool:
        """Whether Dagster shows a file as materialized from the source version that its partition has.

        Args:
            partition: None where it left the catalog.
        """
        partition_key = to_partition_key(receipt.key)
        source_version = partition.source_version if partition is not None else None
        return partition_key not in self._shown_as_failed and self._catalogued.knows(
            partition_key, receipt.desired_version, source_version
        )

    @cached_property
    def _shown_as_failed(self) -> set[str]:
        return failed_on_record(self._names, self._context.instance)

    def _read_back(self, files: Sequence[tuple[Partition, Receipt | None, bool]], space: Space) -> dict[str, Failure]:
        """Tell sound files from damaged ones, of those that are not on record; gives those that are not read now."""
        silent: dict[str, Failure] = {}

        def tell(key: str, found: Found) -> None:
            match found:
                case None:
                    self.sound.add(key)
                case Failure() as failure:
                    self.damaged.add(key)
                    if len(self.damaged) <= FAILURES_LOGGED:
                        self._context.log.warning(failure.reason)
                case error:
                    silent[key] = unanswered(key, error)

        with ReadBack(self._store, space) as read_back:
            for partition, receipt, _ in files:
                if receipt is not None and not self.is_on_record(receipt, partition):
                    read_back.look(partition, receipt.bytes, partial(tell, partition.key))
        if (count := len(self.damaged)) > FAILURES_LOGGED:
            self._context.log.warning(
                f"{count - FAILURES_LOGGED:,} more files are not what they say, {count:,} in all."
            )
        return silent
