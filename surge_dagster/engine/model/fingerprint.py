"""Keys for cached answers: library versions and the machine.

Versions are read from package metadata, so the pool's process does not import torch for them.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from surge_dagster.engine.model.digest import canonical_json

_PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "openvino")
# Increased when the way this package drives a backend changes, so that older cached answers are not used.
_REVISION = 4


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute vectors; "" where one is not installed."""
    return {name: _version(name) for name in _PACKAGES}


@lru_cache(maxsize=1)
def processor() -> str:
    """Model name and instruction set of the processor: a converted model or a speed belongs to one kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    facts = dict(line.split(":", 1) for line in lines[:60] if ":" in line)
    found = {key.strip(): value.strip() for key, value in facts.items()}
    return f"{found.get('model name', found.get('CPU part', ''))} {found.get('flags', found.get('Features', ''))}"


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, and a container's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def cache_key(*facts: object) -> str:
    """32 hex digits over `facts` and the library versions."""
    document = [_REVISION, library_versions(), [str(fact) for fact in facts]]
    return hashlib.sha256(canonical_json(document)).hexdigest()[:32]


def _version(name: str) -> str:
    """Version of an installed package, "" where it is not installed."""
    import importlib.metadata  # imported here to keep the start of workers short

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
