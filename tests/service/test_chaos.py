"""Killed, stopped and replaced processes, switches and idle clients, while requests are answered and a run encodes."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.current_space import read_current, write_current
from surge_dagster.engine.remote.pool import RemotePool
from surge_dagster.engine.remote.workers import RemoteWorkers
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.waiting import in_background, result_of
from tests.engine.runs import failures, finish, in_memory, make_run
from tests.service.lanes import until
from tests.service.load import CLIENTS, SPEC, Answer, Load
from tests.service.running import read_all
from tests.service.service_process import ServiceProcess, service_process
from tests.small_catalogs import Rows, numbered_rows, read_embedded

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

WORKER_KILLS, SERVICE_KILLS, SWITCHES, IDLE = 100, 20, 50, 2_000
ROWS = 10_000
PARTITION_EACH = Thresholds(b_min=ROWS, b_max=2 * ROWS)  # a SuperBatch of its own


def embedded(output: Path, catalog: dict[str, Rows], spec: EncodingSpec = SPEC) -> str:
    """Write the files that a run writes which nothing disturbs; gives the name of their space."""
    with EncoderPool(spec, devices="cpu") as pool:
        finish(make_run(pool, in_memory(catalog), output, PARTITION_EACH))
        return pool.space.name


class GatedRun:
    """A run through a service that reads a partition each time it is told to."""

    def __init__(self, catalog: dict[str, Rows], output: Path, service: ServiceProcess) -> None:
        self._catalog, self._output = catalog, output
        self._gate = threading.Semaphore(0)
        self.pool = RemotePool(SPEC, devices="cpu", service=str(service.run_socket))
        self.pool.start()  # which only a service that lives can answer
        run = make_run(self.pool, self._partitions(), output, PARTITION_EACH)
        self._events = list[Any]()
        self._ended = in_background(lambda: [self._events.append(event) for event in run.events()], "test-run")

    def _partitions(self) -> Iterator[Partition]:
        for partition in in_memory(self._catalog):
            self._gate.acquire()
            yield partition

    def release(self, partitions: int = 1) -> None:
        self._gate.release(partitions)

    def until_encoding(self) -> None:
        """Read a partition, and wait until the service encodes it, or has just done so."""
        before = len(self._events)
        self.release()
        until(lambda: cast(RemoteWorkers, self.pool.dispatcher())._jobs or len(self._events) > before)

    def require_files(self, undisturbed: Path) -> None:
        """Of the whole catalog, with the content of those that nothing disturbed."""
        self.release(len(self._catalog))
        result_of(self._ended)
        assert failures(self._events) == []
        for key in self._catalog:
            own, other = (read_embedded(root, self.pool.space.name, key) for root in (self._output, undisturbed))
            assert np.array_equal(own.matrix, other.matrix)
            assert (own.ids, own.texts, own.text_hashes) == (other.ids, other.texts, other.text_hashes)
            varying: dict[str, Any] = {"oldest_encoded_at": "", "rows_version": ""}
            assert replace(own.facts, **varying) == replace(other.facts, **varying)


@contextmanager
def gated_run(catalog: dict[str, Rows], output: Path, service: ServiceProcess) -> Iterator[GatedRun]:
    run = GatedRun(catalog, output, service)
    try:
        with run.pool:
            yield run
    finally:
        run.release(len(catalog))


def test_killed_and_stopped_workers_leave_no_request_without_an_answer_and_files_as_they_would_be(
    tmp_path: Path,
) -> None:
    catalog: dict[str, Rows] = {f"p{number}": numbered_rows(f"p{number}", ROWS) for number in range(WORKER_KILLS // 2)}
    space = embedded(tmp_path / "undisturbed", catalog)
    embedded(tmp_path / "out", {"first": numbered_rows("first", 10)})
    with (
        service_process(tmp_path / "out") as service,
        gated_run(catalog, tmp_path / "out", service) as run,
        Load(service.address, {space: 16}) as load,
    ):

        def until_answered(side: str) -> None:
            """Until a request is answered that was sent after now."""
            now = time.monotonic()
            until(lambda: load.wrong or any(answer.sent_at > now for answer in load.answers[side][-CLIENTS:]))

        for number in range(WORKER_KILLS):
            side = ("query", "document")[number % 2]
            until_answered(side)
            worker = service.worker(side)
            if side == "document":
                run.until_encoding()
            worker.kill()
            until(lambda old=worker, side=side: service.worker(side) != old)
        for side in load.answers:
            until_answered(side)
        run.require_files(tmp_path / "undisturbed")
        stopped = service.worker("query")
        stopped.suspend()
        begun = time.monotonic()
        until(lambda: service.status("/healthz") == 503)
        print(f"health says so after {time.monotonic() - begun:.1f} s")
        assert stopped.status() == "stopped", "before it is replaced"
        until(lambda: service.status("/healthz") == 200)
        print(f"and is well after {time.monotonic() - begun:.1f} s")
        assert service.worker("query") != stopped
        for side in load.answers:
            until_answered(side)
    print({side: len(answers) for side, answers in load.answers.items()}, load.refused, run.pool.replays)
    assert load.wrong == []
    assert run.pool.replays > 0


def test_killed_services_cost_a_run_nothing_but_time_and_give_no_wrong_vector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog: dict[str, Rows] = {f"p{number}": numbered_rows(f"p{number}", ROWS) for number in range(SERVICE_KILLS + 1)}
    space = embedded(tmp_path / "undisturbed", catalog)
    embedded(tmp_path / "out", {"first": numbered_rows("first", 10)})
    with (
        service_process(tmp_path / "out") as service,
        gated_run(catalog, tmp_path / "out", service) as run,
        Load(service.address, {space: 16}, may_break=True) as load,
    ):
        for number in range(SERVICE_KILLS):
            now = time.monotonic()
            for answers in load.answers.values():
                until(lambda a=answers, now=now: load.wrong or any(each.sent_at > now for each in a[-CLIENTS:]))
            run.until_encoding()
            service.kill(with_workers=number % 2 == 0)
            service.start()
        run.require_files(tmp_path / "undisturbed")
    print({side: len(answers) for side, answers in load.answers.items()}, load.refused, load.broken, run.pool.replays)
    assert load.wrong == [] and load.broken >= SERVICE_KILLS
    assert not [line for line in caplog.messages if "of its own" in line]
    assert run.pool.replays > 0


def test_switches_under_load_are_followed_and_no_answer_is_of_another_space_than_it_names(tmp_path: Path) -> None:
    output, catalog = tmp_path / "out", {"first": numbered_rows("first", 10)}
    spaces = {embedded(output, catalog, replace(SPEC, model=f"hash://{size}")): size for size in (16, 24)}
    store, names, times = open_store(output), list(spaces), list[float]()
    with service_process(output) as service, Load(service.address, spaces) as load:
        until(lambda: service.status(f"/v1/models/{names[1]}") == 200)
        for number in range(1, SWITCHES + 1):
            times.append(time.monotonic())
            write_current(store, names[number % 2], seen=read_current(store))
            times.append(time.monotonic())
            until(lambda: load.wrong or of_space(load, names[number % 2], times[-1]))  # noqa: B023 (called here)
    assert load.wrong == []
    for number, (written_at, ended_at) in enumerate(zip(times[1::2], [*times[2::2], time.monotonic()], strict=True), 1):
        name = names[number % 2]
        followed_at = min(answer.received_at for answer in of_space(load, name, written_at))
        for answers in load.answers.values():
            named = {each.space for each in answers if each.sent_at > followed_at and each.received_at < ended_at}
            assert named <= {name}


def of_space(load: Load, name: str, since: float) -> list[Answer]:
    """Answers to requests of that time on which name the space."""
    return [each for side in load.answers.values() for each in side if each.space == name and each.sent_at > since]


def test_idle_clients_are_ended_and_leave_nothing_behind_while_others_are_answered(tmp_path: Path) -> None:
    space = embedded(tmp_path / "out", {"first": numbered_rows("first", 10)})

    def few_descriptors() -> None:  # as a shell or systemd sets it
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with (
        service_process(tmp_path / "out", prepare=few_descriptors) as service,
        Load(service.address, {space: 16}) as load,
    ):
        host, _, port = service.address.partition(":")
        sizes = list[int]()
        for _ in range(2):
            begun = time.monotonic()
            clients = [socket.create_connection((host, int(port)), timeout=60) for _ in range(IDLE)]
            sending, header = clients[::10], b"GET /healthz HTTP/1.1\r\nX-Slow: " + b"x" * 1_000
            with selectors.DefaultSelector() as idle:
                for client in clients:
                    idle.register(client, selectors.EVENT_READ)
                while idle.get_map():
                    byte, header = header[:1], header[1:]
                    for client in sending:
                        with contextlib.suppress(OSError):
                            client.send(byte)
                    for key, _ in idle.select(0.2):
                        assert isinstance(key.fileobj, socket.socket)
                        idle.unregister(key.fileobj)
                        assert read_all(key.fileobj) == b""
                        key.fileobj.close()
                    assert service.status("/healthz") == 200, "on a connection of its own"
            assert any(answer.sent_at > begun for answer in load.answers["query"])
            sizes.append(service.main.memory_info().rss)
    assert load.wrong == []
    print(sizes)
    assert sizes[1] < sizes[0] + (8 << 20)
