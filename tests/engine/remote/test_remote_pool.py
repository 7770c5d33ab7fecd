"""A run encodes through the service of its machine as it would by itself, and goes on by itself when that is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.config.settings import load_settings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import LARGEST_CHUNK_TEXTS
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.errors import ConfigError, EncoderError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.remote import connection, workers
from surge_dagster.engine.remote.pool import RemotePool
from surge_dagster.engine.support.waiting import in_background, result_of
from surge_dagster.service import served_run
from surge_dagster.service.runs import RunListener
from tests.engine.encoder.conftest import column, faulty_workers, filled_slot
from tests.engine.runs import failures, in_memory, make_run
from tests.service.lanes import until
from tests.service.served_runs import SPEC, remote_pool, run_socket, served, service_process
from tests.small_catalogs import Rows, assert_embedded, numbered_rows

__all__ = ["faulty_workers", "run_socket"]

pytestmark = pytest.mark.usefixtures("faulty_workers", "no_leaks")


def held_texts(folder: Path, *, name: str = "gate", harmless: int = 3) -> list[str]:
    """Texts that no worker finishes before the gate in the folder exists; `.seen` says that one has begun."""
    return [f"seen {folder / name}.seen", f"wait {folder / name}", *(f"{name} {row}" for row in range(harmless))]


def until_begun(folder: Path, name: str = "gate") -> None:
    until((folder / f"{name}.seen").exists)


def open_gate(folder: Path, name: str = "gate") -> None:
    (folder / name).touch()


@contextmanager
def running(pool: EncoderPool, output: Path, catalog: Mapping[str, Rows]) -> Iterator[None]:
    """A run in another thread, which must write what is expected of one that nothing disturbs."""
    run = make_run(pool, in_memory(catalog), output)
    events = in_background(lambda: list(run.events()), "test-run")
    yield
    assert failures(result_of(events)) == []
    for key, rows in catalog.items():
        assert_embedded(output, pool.space.name, key, rows)


def gated_catalog(folder: Path) -> dict[str, Rows]:
    texts = held_texts(folder)
    return {
        "before": numbered_rows("before", 120),
        "held": [(str(row), text) for row, text in enumerate(texts)],
        "after": numbered_rows("after", 230),
    }


def test_two_runs_at_once_write_the_files_that_they_would_write_by_themselves(tmp_path: Path, run_socket: Path) -> None:
    with served(run_socket) as service, remote_pool(run_socket) as first, remote_pool(run_socket) as second:
        assert first.start().calibration.name == service.start().calibration.name
        assert str(run_socket) in first.start().device_reason
        assert first.worker_pids == service.worker_pids
        catalogs = [{f"{run}-{key}": numbered_rows(f"{run}/{key}", 40 * key) for key in range(7)} for run in "ab"]
        with running(first, tmp_path / "a", catalogs[0]), running(second, tmp_path / "b", catalogs[1]):
            pass
        assert first.replays == second.replays == 0


def test_run_counts_what_its_texts_cost(run_socket: Path) -> None:
    texts = [f"text {row}" for row in range(50)]
    with served(run_socket) as service, remote_pool(run_socket) as pool, filled_slot(pool, texts) as slot:
        through, own = pool.encode(slot), service.encode
        with filled_slot(service, texts) as other:
            expected = own(other)
        assert through.costs.tokens == expected.costs.tokens
        assert through.costs.texts_computed == 50
        assert through.costs.encode_seconds > 0
        assert through.costs.work_seconds > 0


def test_chosen_rows_alone_are_encoded(run_socket: Path) -> None:
    texts = [f"text {row}" for row in range(50)]
    rows = np.array([3, 4, 40])
    with served(run_socket), remote_pool(run_socket) as pool, filled_slot(pool, texts) as slot:
        slot.matrix(0, 50)[:] = 0
        call = pool.submit(slot, np.array([0, 10, 30]), rows)
        assert call.result(60) is not None
        assert call.encoded == [(0, 3)]
        expected = np.zeros((50, 16), np.float32)
        expected[rows] = hash_vectors([texts[row] for row in rows], 16)
        assert np.array_equal(slot.matrix(0, 50), expected)


def test_text_that_ends_workers_of_the_service_fails_its_group_alone(run_socket: Path) -> None:
    texts = ["harmless", "die always", "its partition", "another one"]
    with served(run_socket), remote_pool(run_socket) as pool, filled_slot(pool, texts) as slot:
        metrics = pool.submit(slot, np.array([0, 1, 3])).result(60)
        assert metrics is not None
        [failed] = metrics.failed
        assert failed.row == 1
        assert "SIGKILL" in failed.reason
        assert np.array_equal(slot.matrix(3, 4), hash_vectors(texts[3:], 16))


def test_worker_of_the_service_that_is_killed_costs_a_run_its_chunks_alone(tmp_path: Path, run_socket: Path) -> None:
    with served(run_socket) as service, remote_pool(run_socket) as pool:
        with running(pool, tmp_path / "out", gated_catalog(tmp_path)):
            until_begun(tmp_path)
            [pid] = service.worker_pids
            os.kill(pid, signal.SIGKILL)
            until(lambda: service.worker_pids not in ([], [pid]))
            open_gate(tmp_path)
        assert pool.replays == service.replays >= 1


def test_run_goes_on_by_itself_when_its_service_is_killed(
    tmp_path: Path, run_socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with service_process(run_socket) as process, remote_pool(run_socket, patience_seconds=0.0) as pool:
        with running(pool, tmp_path / "out", gated_catalog(tmp_path)):
            until_begun(tmp_path)
            os.kill(process, signal.SIGKILL)
            open_gate(tmp_path)
        [line] = [line for line in caplog.messages if "goes on" in line]
        assert line.endswith("; the run goes on with workers of its own")
        assert len(pool.worker_pids) == 1


def test_rows_that_had_vectors_before_the_service_was_lost_do_not_count_twice(tmp_path: Path, run_socket: Path) -> None:
    texts = [f"text {row}" for row in range(3 * LARGEST_CHUNK_TEXTS)] + held_texts(tmp_path)
    ends = [LARGEST_CHUNK_TEXTS * chunk for chunk in range(4)] + [len(texts)]
    with (
        remote_pool(run_socket, patience_seconds=0.0) as pool,
        ExitStack() as service,
    ):
        service.enter_context(served(run_socket))
        with filled_slot(pool, texts) as slot:
            slot.matrix(0, len(texts))[:] = 0
            call = pool.submit(slot)
            until(lambda: call.finished_rows >= ends[2])  # a worker may answer when it has begun with the next chunk
            service.close()
            until(lambda: pool.worker_pids and call.finished_rows >= ends[2])
            assert call.result(0.01) is None
            open_gate(tmp_path)
            assert call.result(60) is not None
            assert call.encoded == list(pairwise(ends))
            assert np.array_equal(slot.matrix(0, len(texts)), hash_vectors(texts, 16))


def test_run_goes_on_with_the_next_process_of_its_service(tmp_path: Path, run_socket: Path) -> None:
    with remote_pool(run_socket) as pool, ExitStack() as first, ExitStack() as second:
        first.enter_context(served(run_socket))
        with running(pool, tmp_path / "out", gated_catalog(tmp_path)):
            until_begun(tmp_path)
            first.close()
            service = second.enter_context(served(run_socket))
            open_gate(tmp_path)
        assert pool.worker_pids == service.worker_pids


def test_run_goes_on_by_itself_when_its_space_is_no_longer_served(tmp_path: Path, run_socket: Path) -> None:
    with served(run_socket) as service, remote_pool(run_socket) as pool:
        with running(pool, tmp_path / "out", gated_catalog(tmp_path)):
            until_begun(tmp_path)
            service.close()
            open_gate(tmp_path)
        assert pool.worker_pids


def test_run_that_no_service_keeps_goes_on_by_itself(
    tmp_path: Path, run_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_run, "_MOST_SLOTS", 0)
    with served(run_socket) as service, remote_pool(run_socket, patience_seconds=0.3) as pool:
        with running(pool, tmp_path / "out", {"only": numbered_rows("only", 10)}):
            pass
        assert pool.worker_pids != service.worker_pids


def test_run_never_shares_its_memory_with_a_service_that_it_has_given_up(
    tmp_path: Path, run_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        service_process(run_socket) as process,
        remote_pool(run_socket, patience_seconds=0.0) as pool,
        filled_slot(pool, held_texts(tmp_path)) as slot,
    ):
        call = pool.submit(slot)
        until_begun(tmp_path)
        monkeypatch.setattr(workers, "SILENCE_SECONDS", 0.5)
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(EncoderError, match="its processes still have the memory of this run"):
            call.result(60)
        open_gate(tmp_path)


def test_abandoned_slot_is_not_acquired_again_while_the_service_may_write_to_it(
    tmp_path: Path, run_socket: Path
) -> None:
    with (
        served(run_socket),
        remote_pool(run_socket) as pool,
        pool.arena(slots=1, max_texts=10, max_bytes=1_000) as arena,
    ):
        slot = arena.acquire()
        slot.append(column(held_texts(tmp_path)))
        call = pool.submit(slot)
        until_begun(tmp_path)
        call.abandon()
        slot.release()
        assert not arena._free
        open_gate(tmp_path)
        again = arena.acquire()
        again.append(column(["another"]))
        pool.encode(again)
        assert np.array_equal(again.matrix(0, 1), hash_vectors(["another"], 16))


def test_pool_that_is_closed_ends_its_calls(tmp_path: Path, run_socket: Path) -> None:
    with served(run_socket):
        with remote_pool(run_socket) as pool, filled_slot(pool, held_texts(tmp_path)) as slot:
            call = pool.submit(slot)
            until_begun(tmp_path)
            pool.close()
            with pytest.raises(EncoderError, match="closed"):
                call.result(60)
            with pytest.raises(EncoderError, match="closed"):
                pool.submit(slot)
        open_gate(tmp_path)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"spec": EncodingSpec("hash://8")}, "encodes hash-16-.*, and not the space of this run"),
        ({"precision": "bf16"}, "has precision fp32, and this run bf16"),
        ({"backend": "auto"}, "has backend faults:FaultyBackend, and this run auto"),
    ],
)
def test_run_with_other_settings_starts_its_own_workers_and_says_why(
    run_socket: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    other: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr("surge_dagster.engine.remote.pool.socket_folder", lambda: run_socket.parent)
    with served(run_socket) as service:
        with remote_pool(run_socket, **other) as pool, pytest.raises(ConfigError, match=reason):
            pool.start()
        with remote_pool(run_socket, **{**other, "service": "auto"}) as pool:
            pool.start()
            assert pool.worker_pids != service.worker_pids
        [line] = [line for line in caplog.messages if "of its own" in line]
        assert line.startswith("the encoder service ") and line.endswith("; the run starts workers of its own")


def test_run_of_another_version_is_refused(run_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_run, "__version__", "0.0.9")
    with served(run_socket), remote_pool(run_socket) as pool, pytest.raises(ConfigError, match=r"has version 0\.0\.9"):
        pool.start()


@pytest.mark.parametrize(
    ("module", "reason"), [(served_run, "is that of another user than uid 12"), (connection, "belongs to another user")]
)
def test_other_users_are_not_served_and_not_trusted(
    run_socket: Path, monkeypatch: pytest.MonkeyPatch, module: object, reason: str
) -> None:
    monkeypatch.setattr(module, "peer", lambda connection: (1, 12))
    with served(run_socket), remote_pool(run_socket) as pool, pytest.raises(ConfigError, match=reason):
        pool.start()


def test_runs_find_a_service_of_this_machine_and_ask_nobody_where_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_socket: Path
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(run_socket.parent))
    monkeypatch.delenv("SURGE_SERVICE")
    settings = {"model": "hash://16", "devices": "cpu"}
    with EncoderPool(SPEC, devices="cpu") as service, RunListener(lambda: [service]).start() as listener:
        assert listener.path.stat().st_mode & 0o777 == 0o600
        with load_settings(**settings).encoder_pool() as pool:
            pool.start()
            assert pool.worker_pids == service.worker_pids
        # As YAML reads a plain off.
        with load_settings(**settings, service=False).encoder_pool() as pool:
            pool.start()
            assert pool.worker_pids != service.worker_pids
        with load_settings(**settings).encoder_pool(task="query") as pool:
            assert not isinstance(pool, RemotePool)
    assert not listener.path.exists()
