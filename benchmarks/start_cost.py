"""How long until the first text can be encoded, beside loading the same model with sentence-transformers.

The pool's figure is its own `pool_start_seconds`, which includes starting the workers' interpreters and whatever they
import; so the peer is a fresh process as well, imports included, up to a loaded model. Both find their files on disk
from an earlier start, and take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec

_LOAD = (
    "import sys; from sentence_transformers import SentenceTransformer; "
    "SentenceTransformer(sys.argv[1], device=sys.argv[2], local_files_only=True); print('ready', flush=True)"
)


def start_document(spec: EncodingSpec, device: str, repeats: int) -> dict[str, Any]:
    """Median seconds of both starts, and the median of their ratios."""
    with EncoderPool(spec) as pool:  # leaves the caches warm
        folder = pool.space.model_path
    pools, loads = [], []
    for _ in range(repeats):
        with EncoderPool(spec) as pool:
            pools.append(pool.start_seconds)
        loads.append(_load_seconds(folder, device))
    return {
        "pool_start_seconds": statistics.median(pools),
        "sentence_transformers_load_seconds": statistics.median(loads),
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(pools, loads, strict=True)),
        "repeats": repeats,
    }


def _load_seconds(folder: str, device: str) -> float:
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", _LOAD, folder, device],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        seconds = time.perf_counter() - begun
    if ready.strip() != b"ready":
        raise RuntimeError(f"sentence-transformers did not load {folder}: exit code {process.returncode}")
    return seconds
