"""Connections of the client that writes: how long each step may take."""

from __future__ import annotations

import socket

import pytest

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.output.object_store import open_object_store
from surge_dagster.engine.output.retries import Retrier
from surge_dagster.engine.output.storage_options import StorageOptions
from tests.engine.output.object_server import BUCKET


def test_a_store_that_takes_no_body_is_waited_for_as_long_as_one_that_does_not_answer() -> None:
    """Connecting may take longer here than the tests have; more is sent than lies between two sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        store = open_object_store(
            f"s3://{BUCKET}/out",
            StorageOptions(
                endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}",
                access_key_id="k",
                secret_access_key="s",
                timeout_seconds=0.5,
                connect_timeout_seconds=3600.0,
                part_bytes=64 * 1024 * 1024,
            ),
            retrier=lambda where: Retrier(where, attempts=2, sleep=lambda _: None),
        )
        with (
            pytest.raises(TransientError, match="timeout: no answer in time"),
            store.create("space/a.parquet") as upload,
        ):
            upload.write(bytes(32 * 1024 * 1024))
            upload.publish(lambda: None)
    assert store.retries == {"timeout": 1}
