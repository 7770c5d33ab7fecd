"""A catalog of any layout that tests fill, on a disk or in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surge_dagster.engine.sources import Source, open_files
from surge_dagster.engine.sources.listing import SourceFiles
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import ROWS, partitions_of
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import Rows, write_rows


class Shop:
    """A folder, or a prefix of a bucket, that tests fill with files of rows."""

    def __init__(self, folder: Path, server: ObjectServer | None) -> None:
        self._folder = folder
        self.server = server
        self.url = str(folder) if server is None else f"s3://{BUCKET}/cat"
        self.options = server and server.options

    def write(self, name: str, rows: Rows = ROWS, **options: Any) -> None:
        options = {"use_dictionary": False, "compression": "none", **options}
        self.put(name, write_rows(self._folder / name, rows, **options).read_bytes())

    def open(self, below: str = "") -> Source:
        return open_source(self.url + below, storage_options=self.options)

    def files(self, below: str = "") -> SourceFiles:
        return open_files(f"{self.url}{below}", self.options)

    def partitions(self, below: str = "") -> dict[str, Partition]:
        return partitions_of(self.open(below))

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()
        if self.server is not None:
            self.server.delete(f"cat/{name}")

    def put(self, name: str, content: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if self.server is not None:
            self.server.put(f"cat/{name}", content)
