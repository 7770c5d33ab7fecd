"""The hash backend with texts that hold it up: `wait for PATH` blocks its worker until PATH exists.

So a test can stop a run at a known point, look at what is there, and let it go on, without ever guessing a time.
`die before PATH` kills the worker unless PATH exists.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.backends.base import BackendSettings, ChunkFigures, Progress
from surge_dagster.engine.encoder.backends.hash_backend import HashBackend
from surge_dagster.engine.encoder.spec import Space


class GatedBackend(HashBackend):
    def __init__(self, space: Space, settings: BackendSettings) -> None:
        super().__init__(prompt=space.prompt, max_length=space.max_length)

    def forward(self, prepared: Any, matrix: np.ndarray, truncated: np.ndarray, progress: Progress) -> ChunkFigures:
        for text in map(bytes.decode, prepared.encoded):
            if text.startswith("wait for "):
                while not Path(text.removeprefix("wait for ")).exists():
                    progress()
                    threading.Event().wait(0.02)
            if text.startswith("die before ") and not Path(text.removeprefix("die before ")).exists():
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(prepared, matrix, truncated, progress)
