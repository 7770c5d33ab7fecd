"""Devices: the requested devices are used, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.encoder import devices
from surge_dagster.engine.encoder.devices import (
    choose_devices,
)
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.support import disk_cache


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)


def test_auto_takes_every_visible_gpu(two_gpus: None) -> None:
    assert choose_devices("auto").devices == ("cuda:0", "cuda:1")
    assert choose_devices("auto").precision("auto") == "fp16"


@pytest.mark.parametrize(
    ("visible", "count"), [("0,-1,1", 1), (" 2, 0", 2), ("GPU-8932f937,MIG-1,,3", 2)]
)
def test_gpus_are_counted_up_to_the_first_invalid_one(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(choose_devices("cuda").devices) == count


def test_auto_falls_back_to_the_cpu_and_says_what_was_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    choice = choose_devices("auto")
    assert choice.devices == ("cpu",)
    assert "CUDA_VISIBLE_DEVICES" in choice.reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert "without CUDA" in choose_devices("auto").reason
    assert choice.precision("auto") == "fp32"


def test_gpus_are_counted_by_the_files_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "_GPUS", tmp_path)
    (tmp_path / "0000:1a:00.0").mkdir()
    assert choose_devices("auto").devices == ("cuda:0",)


def test_hardware_is_named_for_people(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(devices, "usable_cores", lambda: 16)
    assert [choose_devices(name).hardware for name in ("cpu", "cuda")] == ["16 CPU cores", ""]
    for bus in ("0000:1a:00.0", "0000:3b:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text(
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n"
        )
    names = [choose_devices(name).hardware for name in ("cuda", "cuda:1")]
    assert names == ["2 x NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("cpu", ("cpu",)),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda", ("cuda:0", "cuda:1")),
        (["cuda:1", "cuda:1"], ("cuda:1", "cuda:1")),
    ],
)
def test_explicit_lists_are_kept(
    two_gpus: None, requested: str | list[str], expected: tuple[str, ...]
) -> None:
    assert choose_devices(requested).devices == expected


@pytest.mark.parametrize("requested", ["gpu", "", "cpu,cuda:0", "cuda:2"])
def test_missing_devices_and_mixed_kinds_are_refused(two_gpus: None, requested: str) -> None:
    with pytest.raises(ConfigError, match="devices"):
        choose_devices(requested)


def test_workers_of_gpus_leave_cores_to_launching_and_keep_what_they_compile(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 16)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "backend:cudaMallocAsync")
            settings = choose_devices("cuda").environment
            assert [settings[one] for one in names] == ["backend:cudaMallocAsync"] * 2
    settings = choose_devices("cuda").environment
    assert settings["RAYON_NUM_THREADS"] == "6"
    assert settings["OMP_NUM_THREADS"] == "4"
    assert settings["OMP_WAIT_POLICY"] == "PASSIVE"
    assert {settings[name] for name in names} == {"expandable_segments:True"}
    assert settings["TORCHINDUCTOR_CACHE_DIR"].startswith(str(disk_cache.cache_root()))
    on_cpu = choose_devices("cpu").environment
    assert (on_cpu["RAYON_NUM_THREADS"], on_cpu["OMP_NUM_THREADS"]) == ("16", "16")
    assert not {"OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR"} & set(on_cpu)


@pytest.mark.parametrize(
    "setting", [{"precision": "int4"}, {"precision": "fp16"}, {"backend": "tensorflow"}]
)
def test_invalid_settings_are_refused_before_a_worker_starts(setting: dict) -> None:
    with pytest.raises(ConfigError):
        EncoderPool(EncodingSpec("hash://8"), devices="cpu", **setting)
