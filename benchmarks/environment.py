"""What a benchmark's figures depend on beside the code: the machine and the libraries."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.throughput import cpu_instructions
from surge_dagster.engine.model.fingerprint import usable_cores

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


def machine_facts(device: str, gpu: str | None) -> dict[str, Any]:
    """The processor, how much of it may be used, and the device that encodes."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "device": device,
        "gpu": gpu,
        "processor": next(
            (line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")), "unknown"
        ),
        "cores": usable_cores(),
        "instructions": [name for name in INSTRUCTIONS if name in cpu_instructions()],
        "python": platform.python_version(),
    }


def library_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those libraries that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
