"""Files on a local disk: complete under their final name or absent, with killed and with concurrent
writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.waiting import in_background
from tests.engine.store.test_object_store import names


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    opened = LocalStore(tmp_path / "out")
    opened.prepare("space")
    return opened


def visible(store: LocalStore) -> list[str]:
    return names(store, "space")


def temps(store: LocalStore) -> list[Path]:
    return list(store.root.glob("space/.tmp-*"))


def put(store: LocalStore, name: str, content: bytes) -> None:
    with store.create(name) as upload:
        upload.sink.write(content)
        upload.publish(lambda: None)


def do_concurrently(*tasks: Callable[[], object]) -> None:
    """Do each task in a thread of its own; raises the first error."""
    with ThreadPoolExecutor(len(tasks)) as threads:
        list(threads.map(lambda task: task(), tasks))


class TestAtomicity:
    def test_file_is_invisible_before_it_is_published(self, store: LocalStore) -> None:
        with store.create("space/a.parquet") as upload:
            upload.sink.write(b"x" * 100_000)
            upload.sink.flush()
            assert visible(store) == []
            stored = upload.publish(lambda: None)
            assert visible(store) == ["space/a.parquet"]
        assert (stored.size, temps(store)) == (100_000, [])
        assert [stored] == list(store.list("space")), "the tag of a receipt is the tag of a listing"

    def test_content_reaches_the_disk_before_the_name(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A test cannot cut the power; it can check the order of the calls that survive a power
        cut."""
        final = store.root / "space" / "a.parquet"
        seen: list[tuple[str, int, bool]] = []

        def fsync(descriptor: int) -> None:
            target = Path(f"/proc/self/fd/{descriptor}").readlink()
            seen.append(
                (target.name[:5], target.stat().st_size if target.is_file() else 0, final.exists())
            )

        monkeypatch.setattr("surge_dagster.engine.store.local_store.os.fsync", fsync)
        put(store, "space/a.parquet", b"x" * 1000)
        store.sync("space")
        assert seen == [(".tmp-", 1000, False), ("space", 0, True), ("out", 0, True)]

    def test_writer_that_fails_half_way_leaves_nothing(self, store: LocalStore) -> None:
        with pytest.raises(RuntimeError, match="midway"), store.create("space/a.parquet") as upload:
            upload.sink.write(b"x")
            raise RuntimeError("midway")
        assert visible(store) == temps(store) == []

    def test_result_that_is_no_longer_wanted_is_discarded(self, store: LocalStore) -> None:
        def object_to() -> None:
            raise TransientError("the source changed")

        put(store, "space/a.parquet", b"old")
        with pytest.raises(TransientError), store.create("space/a.parquet") as upload:
            upload.sink.write(b"new")
            upload.publish(object_to)
        assert store.open("space/a.parquet").read() == b"old"
        assert temps(store) == []

    def test_check_of_one_writer_holds_up_no_other_one(self, store: LocalStore) -> None:
        """A check of a source in a bucket is a request."""

        def look() -> None:
            put(store, "space/b.parquet", b"published during the check")

        with store.create("space/a.parquet") as upload:
            upload.sink.write(b"x")
            in_background(lambda: upload.publish(look), "publishing").result(30)
        assert visible(store) == ["space/a.parquet", "space/b.parquet"]

    def test_writer_whose_file_is_replaced_while_it_checks_checks_again(
        self, store: LocalStore
    ) -> None:
        seen: list[bytes] = []

        def look() -> None:
            seen.append(store.open("space/a.parquet").read())
            if len(seen) < 3:
                put(store, "space/a.parquet", b"by another writer" + bytes([len(seen)]))

        put(store, "space/a.parquet", b"old")
        with store.create("space/a.parquet") as upload:
            upload.sink.write(b"new")
            upload.publish(look)
        assert seen == [b"old", b"by another writer\1", b"by another writer\2"]
        assert store.open("space/a.parquet").read() == b"new"


LEAVE_A_TEMP_FILE = """
import os, signal, sys
from surge_dagster.engine.store import open_store
upload = open_store(sys.argv[1]).create("space/a.parquet")
upload.sink.write(b"half")
upload.sink.flush()
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
print("writing", flush=True)
sys.stdin.readline()
"""


class TestTempFiles:
    def test_temp_files_of_dead_writers_are_removed(self, store: LocalStore) -> None:
        command = [sys.executable, "-c", LEAVE_A_TEMP_FILE, str(store.root), "die"]
        assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
        assert len(temps(store)) == 1
        store.sweep("space")
        assert temps(store) == []

    def test_temp_files_of_living_writers_are_kept(self, store: LocalStore) -> None:
        command = [sys.executable, "-c", LEAVE_A_TEMP_FILE, str(store.root), "live"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            store.sweep("space")
            assert len(temps(store)) == 1
            writer.communicate(b"\n", timeout=60)
        with store.create("space/b.parquet"):
            open_store(store.root).sweep("space")
            assert len(temps(store)) == 1, (
                "this process lives too; the other one ended without removing its file"
            )


class TestListing:
    def test_listing_leaves_out_hidden_files_and_folders(self, store: LocalStore) -> None:
        put(store, "space/a.parquet", b"x")
        (store.root / "space" / ".hidden").touch()
        (store.root / "space" / "folder").mkdir()
        (store.root / ".hidden").mkdir()
        assert visible(store) == ["space/a.parquet"]
        assert store.folders() == ["space"]

    def test_listing_leaves_out_names_that_are_not_utf8(self, store: LocalStore) -> None:
        for name in (os.fsdecode(b"caf\xe9"), "space"):
            (store.root / name).mkdir(exist_ok=True)
            (store.root / name / os.fsdecode(b"caf\xe9.parquet")).touch()
            (store.root / name / "café.parquet").touch()
        assert store.folders() == ["space"]
        assert visible(store) == ["space/café.parquet"]

    def test_missing_folder_lists_nothing(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "missing")
        assert list(store.list("space")) == []
        assert store.folders() == []
        assert not (tmp_path / "missing").exists(), "listing creates no folder"

    def test_deep_listing_goes_into_folders_and_starts_at_the_given_one(
        self, store: LocalStore
    ) -> None:
        store.prepare("space/inner")
        store.prepare("space/.hidden")
        for folder in (".hidden/a/b", "space/inner", "space/.hidden"):
            put(store, f"{folder}/x.parquet", b"x")
        put(store, "space/y.parquet", b"y")
        expected = ["space/inner/x.parquet", "space/y.parquet"]
        assert names(store, "space", deep=True) == expected
        assert names(store, ".hidden", deep=True) == [".hidden/a/b/x.parquet"]

    def test_hidden_folders_are_removed_with_their_last_object(self, store: LocalStore) -> None:
        for name in (".hidden/a/b/x", ".hidden/a/c/y", ".hidden/d/z"):
            put(store, name, b"x")
        store.delete(".hidden/a/b/x")
        assert not (store.root / ".hidden" / "a" / "b").exists()
        store.delete(".hidden/d/z")
        assert names(store, ".hidden", deep=True) == [".hidden/a/c/y"]
        store.delete(".hidden/a/c/y")
        store.delete(".hidden/a/c/y")
        assert not (store.root / ".hidden").exists()

    def test_sync_of_a_hidden_folder_that_another_process_removed_is_done(
        self, store: LocalStore
    ) -> None:
        put(store, ".hidden/a/x", b"x")
        LocalStore(store.root).delete(".hidden/a/x")

        store.sync(".hidden/a")

        assert not (store.root / ".hidden").exists()

    def test_sweep_of_a_hidden_folder_removes_empty_folders_and_dead_temp_files(
        self, store: LocalStore
    ) -> None:
        put(store, ".hidden/a/b/x", b"x")
        for folder in (".hidden/a/b", ".hidden/a/c", ".hidden/d/e"):
            (store.root / folder).mkdir(parents=True, exist_ok=True)
            (store.root / folder / ".tmp-1-dead").touch()
        with store.create(".hidden/f/y") as upload:
            store.sweep(".hidden/a")
            store.sweep(".hidden")
            upload.publish(lambda: None)
        hidden = store.root / ".hidden"
        left = {hidden / name for name in ("a", "a/b", "a/b/x", "f", "f/y")}
        assert {*hidden.rglob("*")} - {*hidden.rglob(".lock")} == left
        for name in (".hidden/a/b/x", ".hidden/f/y"):
            (store.root / name).unlink()
        store.sweep(".hidden/a")
        assert (store.root / ".hidden/f").exists()
        store.sweep(".hidden/f")
        assert not (store.root / ".hidden").exists()
        store.sweep(".hidden/f")

    def test_hidden_folder_that_others_keep_removing_is_created_again(
        self, store: LocalStore
    ) -> None:
        """Other runs remove empty folders between any two steps of a writer."""
        over = threading.Event()

        def write(number: int) -> None:
            try:
                for _ in range(60):
                    put(store, f".hidden/a/{number}", b"x")
                    store.delete(f".hidden/a/{number}")
            finally:
                over.set()

        def sweep() -> None:
            while not over.is_set():
                store.sweep(".hidden/a")

        do_concurrently(partial(write, 1), partial(write, 2), partial(write, 3), sweep)

    def test_changed_file_has_another_tag(self, store: LocalStore) -> None:
        put(store, "space/a.parquet", b"x")
        [before] = store.list("space")
        os.utime(store.root / "space" / "a.parquet", ns=(1, 1))
        assert list(store.list("space")) != [before]


class TestOutputsThatCannotBeUsed:
    @pytest.mark.parametrize(
        ("output", "reason"),
        [
            ("file/out", "cannot write to the output folder .*Not a directory"),
            ("/proc/surge", "cannot write to the output folder .*No such file or directory"),
            ("ftp://host/out", "cannot open output"),
            ("hdfs://host/out", "cannot open output"),
        ],
    )
    def test_output_that_is_no_folder_or_cannot_become_one_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, reason: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("file").touch()
        with pytest.raises(ConfigError, match=reason):
            open_store(output).prepare("space")

    def test_disk_that_ignores_case_is_refused(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        (tmp_path / "space").mkdir()
        # such a disk finds the probe under this name too
        (tmp_path / "space" / ".TMP-PROBE").touch()
        with pytest.raises(ConfigError, match="does not distinguish upper from lower case"):
            store.prepare("space")

    def test_removed_folder_is_a_transient_error(self, store: LocalStore) -> None:
        for path in (store.root / "space").iterdir():
            path.unlink()
        (store.root / "space").rmdir()
        with pytest.raises(TransientError, match=r"cannot write .*run again"):
            store.create("space/a.parquet")


AS_NOBODY = """
import os, sys
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source
# after the imports: other users may be unable to read Python's own files
os.setgid(65534), os.setuid(65534)
try:
    if sys.argv[1] == "source":
        list(open_source(sys.argv[2]))
    else:
        store = open_store(sys.argv[2])
        list(store.list("space")), store.folders()
        store.prepare("space")
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user; root itself may write everywhere"
)
class TestPermissions:
    @pytest.mark.parametrize(
        ("what", "mode", "below", "refusal"),
        [
            ("output", 0o755, "", "cannot write to the output folder"),
            ("output", 0o711, "", "cannot list the output folder"),
            ("output", 0o700, "out", "cannot list the output folder"),
            ("source", 0o700, "catalog", "cannot open the source"),
            ("source", 0o711, "", "cannot list the source"),
        ],
    )
    def test_folder_without_the_permission_is_refused(
        self, what: str, mode: int, below: str, refusal: str
    ) -> None:
        # pytest's own are closed to others
        with tempfile.TemporaryDirectory(prefix="surge-closed-") as folder:
            Path(folder).chmod(0o711)
            closed = Path(folder) / "closed"
            closed.mkdir(mode)
            command = [sys.executable, "-c", AS_NOBODY, what, str(closed / below)]
            assert (
                refusal
                in subprocess.run(
                    command, capture_output=True, text=True, timeout=60, check=True
                ).stdout
            )
