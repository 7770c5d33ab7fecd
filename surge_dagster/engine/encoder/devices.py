"""Which devices encode, at what precision, and why: decided without importing torch.

A GPU is used when the driver shows one and the installed torch is a build that can use it; otherwise the CPU is, and
the reason says which of the two was missing. `CUDA_VISIBLE_DEVICES` is respected. On the CPU one worker uses all cores:
a model and its buffers are then in memory once, and the backend's own streams fill the cores.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.fingerprint import library_versions, usable_cores

PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices that encode, one worker each; naming a device twice gives it two workers."""

    devices: tuple[str, ...]
    reason: str

    @property
    def on_cpu(self) -> bool:
        return self.devices[0] == "cpu"


def choose_devices(asked: str | Sequence[str]) -> DeviceChoice:
    """Turns "auto", "cpu", "cuda", "cuda:0,cuda:1" or a list of such names into devices."""
    names = device_names(asked)
    if names == ["auto"]:
        gpus, why_not = _usable_gpus()
        if gpus:
            return DeviceChoice(tuple(gpus), f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} found")
        return DeviceChoice(("cpu",), f"{why_not}; {usable_cores()} CPU cores")
    devices: list[str] = []
    for name in names:
        if name == "cuda":
            gpus, why_not = _usable_gpus()
            if not gpus:
                raise ConfigError(f"devices: cuda was asked for, but {why_not}")
            devices.extend(gpus)
        elif device_kind(name) in ("cpu", "cuda"):
            devices.append(name)
        else:
            raise ConfigError(f"devices: {name!r} is none of auto, cpu, cuda or cuda:N")
    if not devices:
        raise ConfigError("devices: name at least one, or auto")
    if len(set(map(device_kind, devices))) > 1:
        raise ConfigError("devices: CPU and GPU in one pool would encode at different precisions; name one kind")
    if devices[0] != "cpu":
        gpus, why_not = _usable_gpus()
        if missing := sorted(set(devices) - set(gpus)):
            raise ConfigError(f"devices: {', '.join(missing)} not found ({why_not or 'there is ' + ', '.join(gpus)})")
    return DeviceChoice(tuple(devices), "as asked for")


def device_names(asked: str | Sequence[str]) -> list[str]:
    """The names in "cuda:0, cuda:1" or in a list of such texts."""
    names = [asked] if isinstance(asked, str) else asked
    return [part.strip().lower() for name in names for part in name.split(",") if part.strip()]


def device_kind(name: str) -> str | None:
    """What a device of this name is, "auto", "cpu" or "cuda"; None where no device can have it."""
    if re.fullmatch(r"cuda:\d+", name):
        return "cuda"
    return name if name in ("auto", "cpu", "cuda") else None


def choose_precision(asked: str, choice: DeviceChoice) -> str:
    """The requested precision; "auto" is fp32 on the CPU and fp16 on GPUs."""
    if asked == "auto":
        asked = "fp32" if choice.on_cpu else "fp16"
    if asked not in PRECISIONS:
        raise ConfigError(f"precision is auto or one of {', '.join(PRECISIONS)}, not {asked!r}")
    if choice.on_cpu and asked == "fp16":
        raise ConfigError("precision fp16 needs a GPU; use fp32, or bf16 where the CPU has it")
    return asked


def worker_environment(choice: DeviceChoice) -> dict[str, str]:
    """Thread counts for one worker, so that workers together use the cores that there are, and no more."""
    threads = str(worker_threads(choice))
    settings = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "true",
    }
    if not choice.on_cpu:
        # Batches of every length would otherwise leave holes that no later batch fits into.
        settings["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return settings


def worker_threads(choice: DeviceChoice) -> int:
    """CPU threads of one worker."""
    return max(1, usable_cores() // len(choice.devices))


def _usable_gpus() -> tuple[list[str], str]:
    """CUDA devices as torch will number them, and why there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
        why_not = "CUDA_VISIBLE_DEVICES hides every GPU"
    else:
        try:
            count = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
        except OSError:
            count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        why_not = "no NVIDIA GPU found"
    if count == 0:
        return [], why_not
    if not _torch_has_cuda():
        return [], f"torch {library_versions()['torch']} is built without CUDA"
    return [f"cuda:{index}" for index in range(count)], ""


def _torch_has_cuda() -> bool:
    """Read from torch's version file: importing torch costs seconds and memory that only workers should pay."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None
