"""The service believes no run: who breaks the rules, or ends, loses its connection, and other runs go on."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.protocol import SlotLayout
from surge_dagster.engine.encoder.schedule import Job
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.remote.connection import SEALS, requirements
from surge_dagster.engine.remote.pool import RemotePool
from surge_dagster.engine.store import open_store
from surge_dagster.service.served_run import ServedRun, Turns
from surge_dagster.service.server import ServiceServer, run_service
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.space_lanes import LaneSettings
from surge_dagster.service.spaces import ServedSpaces
from tests.engine.encoder.conftest import filled_slot
from tests.engine.encoder.faulty_pools import open_descriptors
from tests.engine.runs import finish, in_memory, make_run
from tests.service.lanes import until
from tests.service.served_runs import remote_pool, served, socket_path
from tests.service.test_server import noted_startup
from tests.small_catalogs import assert_embedded, numbered_rows

HERE = Path(__file__).parent
LAYOUT = SlotLayout(max_texts=8, max_bytes=1_000, dimension=16, dtype="float32")


class Client:
    """A run that says what it likes."""

    def __init__(self, path: Path, service: EncoderPool) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        seat = service.dispatcher().seats[0]
        self.send({"op": "hello"} | requirements(service.space, seat))
        assert self.receive()["op"] == "ready"

    def send(self, message: Any, *descriptors: int) -> None:
        socket.send_fds(self.socket, [json.dumps(message).encode()], descriptors)

    def receive(self) -> protocol.Message:
        received = protocol.receive(self.socket)
        assert received is not None
        return received[0]

    def add_arena(self, size: int | None = None, seals: int = SEALS, flags: int = os.O_RDWR, **layout: Any) -> int:
        """Its descriptor, which a test closes."""
        described = replace(LAYOUT, **layout)
        memory = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, described.slot_bytes if size is None else size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        lent = os.open(f"/proc/self/fd/{memory}", flags)
        self.send({"op": "arena", "arena": 0, "slots": 1, "layout": asdict(described)}, lent)
        os.close(lent)
        return memory

    def encode(self, rows_of_slot: list[str], offsets: list[int] | None = None, **changes: Any) -> None:
        """Texts of the first slot; the offsets and what the message says may be wrong."""
        memory = self.add_arena()
        ends = np.cumsum([0, *(len(text) for text in rows_of_slot)]) if offsets is None else np.array(offsets)
        os.pwrite(memory, ends.astype(np.int64).tobytes(), LAYOUT.starts[0])
        os.pwrite(memory, "".join(rows_of_slot).encode(), LAYOUT.starts[1])
        then = changes.pop("then", None)
        if (chosen := changes.pop("rows", None)) is not None:
            os.pwrite(memory, np.array(chosen, np.int32).tobytes(), LAYOUT.starts[2])
            changes["chosen"] = len(chosen)
        message = {"op": "encode", "job": 0, "arena": 0, "slot": 0, "texts": len(rows_of_slot), "chosen": None}
        descriptors = []
        if (borders := changes.pop("borders", None)) is not None:
            descriptors.append(os.memfd_create("borders"))
            os.write(descriptors[0], np.array(borders, np.int64).tobytes())
        self.send(message | changes, *descriptors)
        if then is not None:
            assert self.receive()["op"] == "progress"
            then(memory)
        for descriptor in (memory, *descriptors):
            os.close(descriptor)

    def is_ended(self) -> bool:
        """Whether the service closes the connection, whatever it says before."""
        while content := self.socket.recv(protocol.MAX_MESSAGE_BYTES):
            assert json.loads(content)["op"] in ("progress", "starting")
        return True


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Path, EncoderPool]]:
    """The socket and the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE.parent / "engine" / "encoder"))
        with socket_path() as path, served(path) as pool:
            yield path, pool


RULES: dict[str, Callable[[Client], object]] = {
    "garbage": lambda client: client.socket.send(b"\xff{"),
    "descriptors with garbage": lambda client: socket.send_fds(client.socket, [b"["], [0, 1, 2]),
    "no object": lambda client: client.send([1]),
    "unknown message": lambda client: client.send({"op": "rm"}),
    "deep nesting": lambda client: client.socket.send(b"[" * 60_000),
    "arena without memory": lambda client: client.send(
        {"op": "arena", "arena": 0, "slots": 1, "layout": asdict(LAYOUT)}
    ),
    "file in place of memory": lambda client: client.send(
        {"op": "arena", "arena": 0, "slots": 0, "layout": asdict(LAYOUT)}, 0
    ),
    "memory that is too small": lambda client: os.close(client.add_arena(size=4095)),
    "memory that can shrink": lambda client: os.close(client.add_arena(seals=0)),
    "memory that nobody can write to": lambda client: os.close(client.add_arena(seals=SEALS | 0x10)),
    "memory that workers cannot write to": lambda client: os.close(client.add_arena(flags=os.O_RDONLY)),
    "endless memory": lambda client: os.close(client.add_arena(size=1 << 50, max_bytes=(1 << 50) - 8192)),
    "vectors of another length": lambda client: os.close(client.add_arena(dimension=15)),
    "unknown arena": lambda client: client.encode(["text"], arena=1),
    "slot beyond": lambda client: client.encode(["text"], slot=1),
    "slot before": lambda client: client.encode(["text"], slot=-1),
    "rows beyond": lambda client: client.encode(["text"], texts=9),
    "rows that are no number": lambda client: client.encode(["text"], texts=1.0),
    "offsets beyond": lambda client: client.encode(["text"], offsets=[0, 1_001]),
    "offsets that fall": lambda client: client.encode(["a", "b"], offsets=[0, 2, 1]),
    "offsets that overflow": lambda client: client.encode(["a", "b", "c"], offsets=[0, 2**63 - 1, -(2**63), 1]),
    "chosen rows beyond": lambda client: client.encode(["a", "b"], rows=[0, 2]),
    "borders beyond": lambda client: client.encode(["a", "b"], borders=[0, 2]),
    "more borders than texts": lambda client: client.encode(["a", "b"], borders=[0, 0, 1]),
    "chosen rows before": lambda client: client.encode(["a", "b"], rows=[-1, 0]),
}


@pytest.mark.parametrize("break_rule", RULES.values(), ids=RULES)
def test_client_that_breaks_a_rule_is_ended_and_another_run_goes_on(
    service: tuple[Path, EncoderPool], tmp_path: Path, break_rule: Callable[[Client], object]
) -> None:
    path, pool = service
    texts = [f"wait {tmp_path / 'gate'}", "another"]
    with remote_pool(path) as other, filled_slot(other, texts) as slot:
        call = other.submit(slot)
        until(lambda: pool.dispatcher()._schedule.jobs)
        before = open_descriptors()
        try:
            client = Client(path, pool)
            break_rule(client)
            assert client.is_ended()
            client.socket.close()
            until(lambda: open_descriptors() <= before)
        finally:
            (tmp_path / "gate").touch()
        assert call.result(60) is not None
        assert np.array_equal(slot.matrix(0, 2), hash_vectors(texts, 16))


def test_run_that_reads_nothing_keeps_no_other_waiting(
    service: tuple[Path, EncoderPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ServedRun.__init__

    def with_little_room(run: ServedRun, connection: socket.socket, *others: Any) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the least that the kernel gives
        begin(run, connection, *others)

    path, pool = service
    with monkeypatch.context() as patch:
        patch.setattr(ServedRun, "__init__", with_little_room)
        client = Client(path, pool)
    client.encode(["a", "b"])
    for number in range(1, 60):
        client.send({"op": "encode", "job": number, "arena": 0, "slot": 0, "texts": 2, "chosen": None})
    with remote_pool(path) as other, filled_slot(other, ["another run"]) as slot:
        assert other.submit(slot).result(30) is not None
    client.socket.close()
    until(lambda: not pool.dispatcher()._schedule.jobs)


def test_client_that_ends_leaves_its_memory_and_its_work(service: tuple[Path, EncoderPool], tmp_path: Path) -> None:
    path, pool = service
    client = Client(path, pool)
    [worker] = pool.dispatcher()._workers.values()
    until(lambda: not worker.assigned)  # of the runs before
    client.encode([f"wait {tmp_path / 'gate'}"])
    until(lambda: worker.assigned)
    texts = ["another run", "has two texts"]
    with remote_pool(path) as other, filled_slot(other, texts) as slot:
        call = other.submit(slot)
        client.socket.close()
        dispatcher = pool.dispatcher()
        until(lambda: (len(dispatcher._schedule.jobs), len(dispatcher._arenas)) == (1, 1))
        assert call.result(0) is None  # the worker finishes the chunk that it has
        (tmp_path / "gate").touch()
        assert call.result(60) is not None
        assert np.array_equal(slot.matrix(0, 2), hash_vectors(texts, 16))
    assert not pool.dispatcher()._schedule.jobs


def test_rows_that_change_after_they_were_checked_end_no_other_run(
    service: tuple[Path, EncoderPool], tmp_path: Path
) -> None:
    path, pool = service
    texts = [f"wait {tmp_path / 'gate'}", "another"]
    with (
        remote_pool(path) as other,
        filled_slot(other, texts) as slot,
        filled_slot(other, texts) as next_slot,  # with it the worker has all that it gets at a time
    ):
        calls = [other.submit(slot), other.submit(next_slot)]
        until(lambda: len(pool.dispatcher()._schedule.jobs) == 2)
        client = Client(path, pool)
        client.encode(["a"], rows=[0], then=lambda memory: os.pwrite(memory, b"\xff\xff\xff\x7f", LAYOUT.starts[2]))
        (tmp_path / "gate").touch()
        for call, held in zip(calls, (slot, next_slot), strict=True):
            assert call.result(60) is not None
            assert np.array_equal(held.matrix(0, 2), hash_vectors(texts, 16))
        while (message := client.receive())["op"] != "done":
            pass
        [(row, reason)] = message["failed"]
        assert row == 0
        assert "IndexError" in reason
        client.socket.close()


def test_runs_get_the_same_share_however_they_cut_their_texts() -> None:
    begun: list[Job] = []

    class Recorder:
        encode = staticmethod(begun.append)

    turns = Turns(Recorder())  # pyright: ignore[reportArgumentType]
    large, small = [_job(900) for _ in range(4)], [_job(300) for _ in range(6)]
    for job in large:
        turns.add("large", job)
    for job in small:
        turns.add("small", job)
    for number in range(10):
        turns.end("large" if begun[number] in large else "small", begun[number])
    assert [job in large for job in begun] == [True, True, *2 * [True, False, False, False]]


def test_run_encodes_through_the_service_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, said = SimpleQueue[ServiceServer](), list[str]()
    monkeypatch.setattr("surge_dagster.service.server.ServiceServer.startup", noted_startup(servers))
    rows = {key: numbered_rows(key, 20) for key in "ab"}
    spec = EncodingSpec("hash://16", query_prompt="find: ")
    with EncoderPool(spec, devices="cpu") as pool:
        run = make_run(pool, in_memory({"a": rows["a"]}), tmp_path)
        finish(run)
    with socket_path() as path, ServedSpaces(open_store(tmp_path), LaneSettings("cpu")) as spaces:
        settings = ServiceSettings(port=0, run_socket=path)
        thread = threading.Thread(target=run_service, args=(spaces, settings, said.append))
        thread.start()
        server = servers.get(timeout=60)
        with RemotePool(spec, devices="cpu", service=str(path)) as pool:
            assert pool.start().device_reason.endswith(f"by the encoder service at {path}")
            [bulk] = spaces.served()
            assert pool.worker_pids == bulk.documents.pool.worker_pids
            finish(make_run(pool, in_memory(rows), tmp_path))
        server.handle_exit(signal.SIGTERM, None)
        thread.join()
    for key, expected in rows.items():
        assert_embedded(tmp_path, run.space.name, key, expected)


def _job(weight: int) -> Job:
    return SimpleNamespace(ends=[0, weight])  # pyright: ignore[reportReturnType]
