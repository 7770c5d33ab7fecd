"""The others, on the same texts, each with the best of three batch sizes.

A peer that is not installed, or cannot run here, is a row with the reason and never an error. Every peer loads one
folder: the pool's model with the same maximum length in the files, so that all of them read equally much of a text.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surge_dagster.engine.model.fingerprint import usable_cores
from surge_dagster.engine.model.spec import Space

CPU_BATCH_SIZES = (16, 32, 128)
GPU_BATCH_SIZES = (128, 512, 2_048)


@dataclass(frozen=True, slots=True)
class Setting:
    """What every peer is given.

    Attributes:
        folder: the model, with the space's maximum length in its files.
        onnx_file: where the model's ONNX export is, or is to be: all workloads of a model share it.
        device: "cpu" or "cuda:0".
        pilot: texts to find the batch size with.
    """

    space: Space
    folder: Path
    onnx_file: Path
    device: str
    pilot: list[str]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return CPU_BATCH_SIZES if self.device == "cpu" else GPU_BATCH_SIZES


class Unavailable(Exception):
    """A peer cannot take part; the message is one line that says why."""


class Peer(Protocol):
    """Text in, vectors in host memory; `batch_size` is 0 where it cannot be chosen."""

    precision: str
    batch_size: int

    def encode(self, texts: list[str]) -> np.ndarray: ...

    def close(self) -> None: ...


def peer_folder(space: Space, folder: Path) -> Path:
    """A copy of the space's model whose files name the space's maximum length."""
    shutil.copytree(space.model_path, folder)
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / name).exists():
            document = json.loads((folder / name).read_text()) | {key: space.max_length}
            (folder / name).write_text(json.dumps(document))
    return folder


def require(*modules: str) -> None:
    """Raises `Unavailable` when a module is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise Unavailable(f"{module} is not installed")


def best_batch_size(setting: Setting, encode: Callable[[int], object]) -> int:
    """The batch size that takes the least time on the pilot texts."""

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        encode(size)
        return time.perf_counter() - begun

    encode(setting.batch_sizes[0])
    return min(setting.batch_sizes, key=seconds)


class SentenceTransformers:
    """`SentenceTransformer.encode`: in fp32, or on a GPU in fp16 with the fastest attention that is installed."""

    def __init__(self, setting: Setting, precision: str = "fp32") -> None:
        import torch

        options: dict[str, Any] = {"torch_dtype": torch.float32}
        if precision == "fp16":
            if setting.device == "cpu":
                raise Unavailable("fp16 needs a GPU")
            attention = "flash_attention_2" if find_spec("flash_attn") else "sdpa"
            options = {"torch_dtype": torch.float16, "attn_implementation": attention}
        self.attention: str = options.get("attn_implementation", "default")
        self.precision = precision
        self._model = load_model(setting.folder, setting.device, options)
        self.batch_size = 0
        self.batch_size = best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(texts, batch_size=batch_size or self.batch_size, show_progress_bar=False)

    def close(self) -> None:
        del self._model


class SentenceTransformersPool:
    """Its multi-process pool: a process per GPU, or per CPU core, each with its share of the cores."""

    precision = "fp32"

    def __init__(self, setting: Setting) -> None:
        import torch

        cores = usable_cores()
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if setting.device != "cpu" else []
        devices = gpus or ["cpu"] * cores
        self._model = load_model(setting.folder, "cpu", {"torch_dtype": torch.float32})
        with _environment(OMP_NUM_THREADS=str(max(1, cores // len(devices)))):
            self._pool = self._model.start_multi_process_pool(devices)
        for _ in devices:
            self._model.encode(setting.pilot[: 4 * len(devices)], pool=self._pool, chunk_size=1)
        self.batch_size = best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(texts, pool=self._pool, batch_size=batch_size or self.batch_size)

    def close(self) -> None:
        self._model.stop_multi_process_pool(self._pool)


class Daft:
    """Daft's `embed_text` with its provider "transformers", over a table in memory; it offers no batch size."""

    precision = "fp32"
    batch_size = 0

    def __init__(self, setting: Setting) -> None:
        require("daft")
        self._folder = str(setting.folder)
        self.encode(setting.pilot[:8])

    def encode(self, texts: list[str]) -> np.ndarray:
        daft = import_module("daft")
        vector = import_module("daft.functions").embed_text(
            daft.col("text"), provider="transformers", model=self._folder
        )
        table = daft.from_pydict({"text": texts}).select(vector.alias("vector")).to_arrow()
        column = table.column("vector").combine_chunks()
        storage = getattr(column, "storage", column)
        return np.asarray(storage.flatten()).reshape(len(texts), -1)

    def close(self) -> None:
        pass


def load_model(folder: Path, device: str, options: dict[str, Any]) -> Any:
    """sentence-transformers' model from a folder, without a look at any hub."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return SentenceTransformer(str(folder), device=device, local_files_only=True, model_kwargs=options)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
