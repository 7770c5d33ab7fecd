"""A local disk that fails at a step of publishing that the test chooses."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.engine.store.store import StoredObject


class FaultyStore(LocalStore):
    """A local disk on which an action runs at one step of publishing the files of some keys, staged
    or not."""

    def __init__(self, root: Path, keys: set[str], step: str, happen: Callable[[], None]) -> None:
        super().__init__(root)
        self._keys = keys
        self._step = step
        self._happen = happen

    def create(self, name: str) -> LocalUpload:
        struck = any(name.endswith(f"/{key}.parquet") or f"/{key}/" in name for key in self._keys)
        if struck and self._step == "create":
            self._happen()
        upload = FaultyUpload(self.root, name)
        if struck:
            upload.step = self._step
            upload.happen = self._happen
            sink = FaultyFile(FaultySink(upload, upload.sink), "w")
            sink.descriptor = upload.sink.fileno()
            upload.sink = sink
        return upload

    def sync(self, folder: str) -> None:
        if self._step == "sync":
            self._happen()
        super().sync(folder)


class FaultyUpload(LocalUpload):
    step = ""
    happen: Callable[[], None] = staticmethod(lambda: None)

    def flush(self) -> None:
        if self.step == "publish":
            self.happen()
        super().flush()

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        stored = super().publish(still_wanted)
        if self.step == "published":
            self.happen()
        return stored

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.step == "exit":
            self.happen()


class FaultySink(io.RawIOBase):
    """Accepts a thousand bytes and then fails."""

    def __init__(self, upload: FaultyUpload, sink: pa.NativeFile) -> None:
        self._upload = upload
        self._sink = sink
        self._left = 1000

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._upload.step == "write" and self._left < 0:
            self._sink.write(data[: self._left])
            self._upload.happen()
        return self._sink.write(data)

    def close(self) -> None:
        self._sink.close()
        super().close()


class FaultyFile(pa.PythonFile):
    descriptor = -1

    def fileno(self) -> int:
        return self.descriptor
