"""The devices of a pool: which ones encode, at what precision, and why.

A GPU is used when the driver shows one and the installed torch can use it; otherwise the CPU is,
and the reason says what was missing. On the CPU one worker uses all cores: the model is in memory
once.

This module does not import torch: the versions of libraries come from package metadata.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.counts import counted

PRECISIONS = ("fp32", "fp16", "bf16")
# Of a machine with GPUs: those that the tokenizer leaves to the threads that launch, read and
# write.
_LAUNCHING_CORES = 4
_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder per GPU
_PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "openvino")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a pool.

    Attributes:
        endpoint: the server that encodes behind HTTP, for people; "" if these devices do.
    """

    devices: tuple[str, ...]
    reason: str
    endpoint: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.devices[0] == "cpu"

    @property
    def hardware(self) -> str:
        """Return what encodes, for people: "2 x NVIDIA L4", "16 CPU cores", or "" if unknown."""
        if self.endpoint:
            return ""
        if self.on_cpu:
            return counted(usable_cores(), "CPU core")
        try:
            facts = [(gpu / "information").read_text() for gpu in _GPUS.iterdir()]
        except OSError:
            return ""
        models = re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(facts), re.MULTILINE)
        if not models:
            return ""
        count = len(set(self.devices))
        return (f"{count} x " if count > 1 else "") + " or ".join(sorted(set(models)))

    def precision(self, requested: str) -> str:
        """ "auto" is fp32 on the CPU and fp16 on GPUs."""
        if requested == "auto":
            return "fp32" if self.on_cpu else "fp16"
        if requested not in PRECISIONS:
            raise ConfigError(
                f"precision is auto or one of {', '.join(PRECISIONS)}, not {requested!r}"
            )
        if self.on_cpu and requested == "fp16":
            raise ConfigError("precision fp16 needs a GPU; use fp32, or bf16 where the CPU has it")
        return requested

    @property
    def threads(self) -> int:
        return max(1, usable_cores() // len(self.devices))

    @property
    def environment(self) -> dict[str, str]:
        """Thread counts, so that all workers together use each core once."""
        launching = self.threads
        tokenizing = launching
        if not self.on_cpu:
            launching = min(launching, _LAUNCHING_CORES)
            tokenizing = max(1, (usable_cores() - _LAUNCHING_CORES) // len(self.devices))
        settings = {
            "OMP_NUM_THREADS": str(launching),
            "MKL_NUM_THREADS": str(launching),
            "RAYON_NUM_THREADS": str(tokenizing),
            "TOKENIZERS_PARALLELISM": "true",
        }
        if not self.on_cpu:
            settings |= {"OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            settings["TORCHINDUCTOR_CACHE_DIR"] = str(disk_cache.place("compiled"))
            # Without it batches of different lengths fragment the GPU's memory. Newer versions of
            # torch use the first name.
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            requested = [os.environ[name] for name in names if name in os.environ]
            settings |= dict.fromkeys(names, [*requested, "expandable_segments:True"][0])
        return settings


def no_devices(endpoint: str) -> DeviceChoice:
    """Return the choice for an encoder behind HTTP: one worker, which sends the requests."""
    return DeviceChoice(("cpu",), "behind HTTP", endpoint)


def choose_devices(requested: str | Sequence[str]) -> DeviceChoice:
    """Return the devices for "auto", "cpu", "cuda", "cuda:0,cuda:1" or a list of such names.

    Raises:
        ConfigError: they are not there.
    """
    names = device_names(requested)
    gpus, why_not = _usable_gpus()
    if names == ["auto"]:
        if gpus:
            return DeviceChoice(tuple(gpus), f"{counted(len(gpus), 'GPU')} found")
        return DeviceChoice(("cpu",), why_not)

    devices: list[str] = []
    for name in names:
        if device_kind(name) not in ("cpu", "cuda"):
            raise ConfigError(f"devices: unknown name {name!r}. Use auto, cpu, cuda or cuda:N.")
        devices.extend(gpus if name == "cuda" and gpus else [name])
    if not devices:
        raise ConfigError("devices: name at least one, or auto")
    if len(set(map(device_kind, devices))) > 1:
        raise ConfigError(
            "devices: CPU and GPU in one pool would encode at different precisions; name one kind"
        )
    if missing := sorted(set(devices) - {"cpu", *gpus}):
        found = why_not or f"there is {', '.join(gpus)}"
        raise ConfigError(f"devices: {', '.join(missing)} not found ({found})")
    return DeviceChoice(tuple(devices), "as requested")


def device_names(requested: str | Sequence[str]) -> list[str]:
    """The names in "cuda:0, cuda:1" or in a list of such texts."""
    names = [requested] if isinstance(requested, str) else requested
    return [part.strip().lower() for name in names for part in name.split(",") if part.strip()]


def device_kind(name: str) -> str | None:
    """ "auto", "cpu" or "cuda"; None for an invalid name."""
    if re.fullmatch(r"cuda:\d+", name):
        return "cuda"
    return name if name in ("auto", "cpu", "cuda") else None


def _usable_gpus() -> tuple[list[str], str]:
    """Return CUDA devices as torch will number them, or why there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ignores what follows the first invalid one, such as -1.
        count = len(list(takewhile(re.compile(r"\s*(\d|GPU-|MIG-)").match, visible.split(","))))
        why_not = "CUDA_VISIBLE_DEVICES hides every GPU"
    else:
        why_not = "no NVIDIA GPU found"
        try:
            count = len(list(_GPUS.iterdir()))
        except OSError:  # WSL does not have the driver's files
            count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count == 0:
        return [], why_not
    if not _torch_has_cuda():
        return [], f"torch {library_versions()['torch']} is built without CUDA"
    return [f"cuda:{index}" for index in range(count)], ""


def _torch_has_cuda() -> bool:
    """Read from torch's version file: importing torch takes seconds and memory."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    try:
        text = (Path(torch.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Of the libraries that compute vectors; "" where one is not installed."""
    from importlib import metadata  # imported here to keep the start of workers short

    versions: dict[str, str] = dict.fromkeys(_PACKAGES, "")
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@lru_cache(maxsize=1)
def processor() -> str:
    """Model name and instruction set: a converted model or a speed belongs to one kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    pairs = (line.partition(":") for line in lines[:60])
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    model = facts.get("model name", facts.get("CPU part", ""))
    return f"{model} {facts.get('flags', facts.get('Features', ''))}"


def usable_cores() -> int:
    """Return the cores that affinity and a container's CPU quota leave to this process."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores
