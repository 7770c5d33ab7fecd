"""Bench: the settings of a measurement on a GPU, its results, and the models it makes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.gpu_models import SHAPES, make_model
from benchmarks.paced_runs import drawn_texts
from surge_dagster import EncoderPool, EncodingSpec

MEAN_TOKENS = (11, 57, 256)
_BYTES_OF_TOKENS = {11: 47, 57: 260, 256: 1_280}
# Of an H100 or H200 SXM by NVIDIA's data sheet: dense fp16 and bf16, floating-point operations per
# second.
SHEET_FLOPS = 989e12


class Bench:
    """The settings, the results so far, and the models that were made."""

    def __init__(self, settings: argparse.Namespace, folder: Path) -> None:
        self.settings = settings
        self.quick: bool = settings.quick
        self.device = torch.device(settings.device)
        self.on_cuda = self.device.type == "cuda"
        self.kind = torch.float16
        self.precision = "fp16"
        if not self.on_cuda:
            self.kind = torch.float32
            self.precision = "fp32"
        self.began = time.monotonic()
        self.folder = folder
        self.results = Path(settings.out)
        self.results.mkdir(parents=True, exist_ok=True)
        self.peak = SHEET_FLOPS
        self.missed: list[str] = []
        self._case: tuple[str, str, int] | None = None
        self._encoders: EncoderPool | None = None

    def say(self, stage: str, **facts: Any) -> None:
        """Print a result and append it to the file."""
        row = {"at": round(time.monotonic() - self.began, 1), "stage": stage} | facts
        with (self.results / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = []
        for name, value in row.items():
            form = ".4g" if isinstance(value, float) else ""
            shown.append(f"{name}={value:{form}}")
        print(*shown, flush=True)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def first_if_quick(self, cases: list[Any]) -> list[Any]:
        return cases[:1] if self.quick else cases

    def has_time(self, seconds: int, name: str) -> bool:
        """Return whether this many seconds remain; if not, the case is listed as not measured."""
        remaining = self.settings.seconds - (time.monotonic() - self.began)
        if remaining < self.size(seconds, 5):
            self.missed.append(name)
            return False
        return True

    def model(self, name: str) -> str:
        """Return the folder of a model of this shape: MiniLM's own, others with random weights and
        its tokenizer."""
        own = Path(self.settings.model)
        if name == "minilm":
            return str(own)
        folder = self.folder / name
        if not folder.exists():
            shape = SHAPES[name].quick() if self.quick else SHAPES[name]
            make_model(folder, shape, own, str(self.device), "float16")
        return str(folder)

    def forget_compiled(self) -> None:
        """Let torch compile layers again: of one class it compiles eight variants in a process, and
        then computes others as they are."""
        torch.compiler.reset()

    def new_pool(self, name: str, workers: int = 1, backend: str = "auto") -> EncoderPool:
        return EncoderPool(
            EncodingSpec(self.model(name)),
            devices=[str(self.device)] * workers,
            precision=self.precision,
            backend=backend,
        )

    def encoders(self, name: str, backend: str, workers: int) -> EncoderPool:
        """Return a pool that stays until another one is requested."""
        if self._encoders is None or self._case != (name, backend, workers):
            self.close_encoders()
            self._case = (name, backend, workers)
            self._encoders = self.new_pool(name, workers, backend)
        return self._encoders

    def close_encoders(self) -> None:
        if self._encoders is not None:
            self._encoders.close()
        self._encoders = None

    def texts(self, mean_tokens: int, count: int) -> pa.LargeStringArray:
        """Return synthetic titles and descriptions."""
        return drawn_texts(count, _BYTES_OF_TOKENS[mean_tokens], seed=1)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.kind)

    def timed(self, call: Callable[[], Any], seconds: float = 0.3) -> float:
        """Return the median seconds of a call on the device, after it ran three times."""
        times: list[float] = []
        for _ in range(self.size(3, 1)):
            call()
        end = time.perf_counter()
        if not self.quick:
            end += seconds
        while len(times) < 3 or time.perf_counter() < end:
            times.append(self.once(call))
        return float(np.median(times))

    def once(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call on the device."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
