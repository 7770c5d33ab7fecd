"""A store as a read-only filesystem of pyarrow, which its datasets read from."""

from __future__ import annotations

from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.fs as fs

from surge_dagster.engine.files.formats import format_of, open_checked
from surge_dagster.engine.store.store import Store


def filesystem_of(store: Store) -> fs.FileSystem:
    """A read-only filesystem whose paths are the store's names.

    An Arrow file gives nothing that was not compared with its checksums; of a Parquet file pyarrow does that itself.
    """
    return fs.PyFileSystem(_Reading(store))


class _Reading(fs.FileSystemHandler):
    """Opens files; everything else is refused."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reading) and other._store.url == self._store.url

    def __hash__(self) -> int:
        return hash(self._store.url)

    def get_type_name(self) -> str:
        return "surge-dagster"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def open_input_file(self, path: str) -> pa.NativeFile:
        return open_checked(self._store.open(path), format_of(path) or "parquet")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def _info(self, path: str) -> fs.FileInfo:
        try:
            with self._store.open(path) as file:
                return fs.FileInfo(path, fs.FileType.File, size=file.size())
        except FileNotFoundError:
            return fs.FileInfo(path, fs.FileType.NotFound)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("embeddings are opened for reading only")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse
