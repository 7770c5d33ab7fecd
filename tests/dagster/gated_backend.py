"""The hash backend with texts that hold it up: `wait for PATH` blocks its worker until PATH exists;
PATH.reached says that it does, and holds the name of the host.

So a test can stop a run at a known point, look at what is there, and let it go on, without ever
guessing a time.
"""

from __future__ import annotations

import platform
import threading
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import HashBackend, Progress, Rows


def use_gated_backend() -> None:
    """Make this backend the default of the encoder pools of this process."""
    assert EncoderPool.__init__.__kwdefaults__
    EncoderPool.__init__.__kwdefaults__["backend"] = "gated_backend:GatedBackend"


class GatedBackend(HashBackend):
    def forward(self, prepared: Any, rows: Rows, progress: Progress) -> Costs:
        for text in map(bytes.decode, prepared):
            if text.startswith("wait for "):
                gate = Path(text.removeprefix("wait for "))
                if not gate.exists():
                    gate.with_suffix(".reached").write_text(platform.node())
                while not gate.exists():
                    progress()
                    threading.Event().wait(0.02)
        return super().forward(prepared, rows, progress)
