"""An output in a bucket: its derived spaces and its change feed."""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.store.object_store import ObjectStore
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.store.object_server import ObjectServer
from tests.engine.store.test_object_store import open_store_of
from tests.spaces import KEYS, Spaces

MODEL = "hash://16"


def upload(folder: Path, store: ObjectStore) -> None:
    """Put every file of an output into a bucket."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with store.create(str(path.relative_to(folder))) as made:
                made.sink.write(path.read_bytes())
                made.publish(lambda: None)


def test_space_in_a_bucket_is_derived_and_followed(
    three_spaces: Spaces, tmp_path: Path, object_server: ObjectServer
) -> None:
    made, store = three_spaces.copy_to(tmp_path, (MODEL,)), open_store_of(object_server)
    upload(made.root / "output", store)
    for dtype in ("int8", "binary"):
        for action in ("derived", "fresh"):
            run = DeriveRun(store, made.of(MODEL), dtype)
            assert [(event.key, getattr(event, "action", event)) for event in run.events()] == [
                (key, action) for key in KEYS
            ]
        run.measure_recall()
        assert run.report.recall is not None
        assert not [
            event for event in verify(made.source, store, run.space) if isinstance(event, Violation)
        ]
    store.delete(made.of(MODEL).name + "/b.parquet")
    run = DeriveRun(store, made.of(MODEL), "int8", removed="delete")
    list(run.events())
    assert run.report.partitions_removed == ["b"]
