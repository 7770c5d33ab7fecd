"""Other libraries on the same texts, each with the best of three batch sizes.

A peer that is not installed or cannot run here raises `Unavailable`, which the table shows. All
peers load one folder: the pool's model with the workload's maximum length in its files, so that
they read equally many tokens of a text.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np

from benchmarks.encode.inputs import load_tokenizer, token_lengths
from benchmarks.harness import first_line
from surge_dagster.engine.encoder.devices import usable_cores
from surge_dagster.engine.model.spec import Space

CPU_BATCH_SIZES = (16, 32, 128)
GPU_BATCH_SIZES = (128, 512, 2_048)
_PRODUCT_ROWS = 2_048


@dataclass(frozen=True, slots=True)
class Setting:
    """The input of every peer.

    Attributes:
        folder: the model, with the space's maximum length in its files.
        onnx_file: path of the model's ONNX export, which all workloads of a model share.
        device: "cpu" or "cuda:0".
        pilot: texts with which the batch size is found.
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
    """A peer cannot take part; the message says why in one line."""


class Peer(Protocol):
    """Text in, vectors in host memory, or seconds where there are none; `batch_size` is 0 where it
    cannot be chosen."""

    precision: str
    batch_size: int

    def encode(self, texts: list[str]) -> np.ndarray | float: ...

    def close(self) -> None: ...


def peer_folder(space: Space, folder: Path) -> Path:
    """A copy of the space's model whose files name the space's maximum length."""
    shutil.copytree(space.model_path, folder)
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        if (folder / name).exists():
            document = json.loads((folder / name).read_text()) | {key: space.max_length}
            (folder / name).write_text(json.dumps(document))
    return folder


class SentenceTransformers:
    """`SentenceTransformer.encode`: in fp32, or on a GPU in fp16 with the fastest attention that is
    installed."""

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
        self._model = _load_model(setting.folder, setting.device, options)
        self.batch_size = 0
        self.batch_size = _best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(
            texts, batch_size=batch_size or self.batch_size, show_progress_bar=False
        )

    def close(self) -> None:
        del self._model


class SentenceTransformersPool:
    """sentence-transformers' multi-process pool: a process per GPU, or per CPU core with its share
    of the cores."""

    precision = "fp32"

    def __init__(self, setting: Setting) -> None:
        import torch

        cores = usable_cores()
        gpus = (
            [f"cuda:{index}" for index in range(torch.cuda.device_count())]
            if setting.device != "cpu"
            else []
        )
        devices = gpus or ["cpu"] * cores
        self._model = _load_model(setting.folder, "cpu", {"torch_dtype": torch.float32})
        with patch.dict(os.environ, OMP_NUM_THREADS=str(max(1, cores // len(devices)))):
            self._pool = self._model.start_multi_process_pool(devices)
        for _ in devices:
            self._model.encode(setting.pilot[: 4 * len(devices)], pool=self._pool, chunk_size=1)
        self.batch_size = _best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(texts, pool=self._pool, batch_size=batch_size or self.batch_size)

    def close(self) -> None:
        self._model.stop_multi_process_pool(self._pool)


class OnnxRuntime:
    """onnxruntime on texts sorted by length, as sentence-transformers does it, with all cores in
    one pass."""

    precision = "fp32"

    def __init__(self, setting: Setting) -> None:
        if setting.device != "cpu":
            raise Unavailable("compared on CPUs alone")
        path = _exported(setting)
        onnxruntime = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = usable_cores()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = load_tokenizer(setting.space)
        self._tokenizer.enable_truncation(setting.space.max_length)
        self._tokenizer.enable_padding(pad_id=self._tokenizer.token_to_id("[PAD]") or 0)
        self._dimension = setting.space.dimension
        self.batch_size = 0
        self.batch_size = _best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        step = batch_size or self.batch_size
        order = np.argsort([-len(text) for text in texts], kind="stable")
        vectors = np.empty((len(texts), self._dimension), np.float32)
        for start in range(0, len(texts), step):
            rows = order[start : start + step]
            tokens = self._tokenizer.encode_batch_fast([texts[row] for row in rows])
            given = {
                "input_ids": np.array([text.ids for text in tokens], np.int64),
                "attention_mask": np.array([text.attention_mask for text in tokens], np.int64),
            }
            vectors[rows] = self._session.run(None, given)[0]
        return vectors

    def close(self) -> None:
        del self._session


class Daft:
    """Daft's `embed_text` with its provider "transformers", over a table in memory; its batch size
    is fixed."""

    precision = "fp32"
    batch_size = 0

    def __init__(self, setting: Setting) -> None:
        _require("daft")
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


class Products:
    """The matrix products of the model's layers alone, on as many tokens: what no encoder is faster
    than."""

    batch_size = 0

    def __init__(self, setting: Setting, precision: str) -> None:
        import torch

        config = json.loads(next(setting.folder.glob("**/config.json")).read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.precision, self._space, self._layers = (
            precision,
            setting.space,
            config["num_hidden_layers"],
        )
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden))
        self._products = [
            (
                torch.randn(_PRODUCT_ROWS, inputs).to(setting.device, kind),
                torch.randn(outputs, inputs).to(setting.device, kind),
            )
            for inputs, outputs in shapes
        ]
        self.encode(setting.pilot)

    def encode(self, texts: list[str]) -> float:
        """The seconds of the products."""
        import torch

        passes = token_lengths(self._space, texts).sum() / _PRODUCT_ROWS
        whole, begun = max(1, round(passes)), time.perf_counter()
        for _ in range(whole * self._layers):
            for states, weights in self._products:
                torch.nn.functional.linear(states, weights)
        if self._products[0][0].is_cuda:
            torch.cuda.synchronize()
        return float((time.perf_counter() - begun) * passes / whole)

    def close(self) -> None:
        self._products = []


def _load_model(folder: Path, device: str, options: dict[str, Any]) -> Any:
    """Load a sentence-transformers model from a folder, without any network."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return SentenceTransformer(
        str(folder), device=device, local_files_only=True, model_kwargs=options
    )


def _exported(setting: Setting) -> Path:
    """Export the model as one ONNX file (transformer, pooling, normalization), unless it exists
    already."""
    _require("onnxruntime", "onnx", "onnxscript")
    path = setting.onnx_file
    if not path.exists():
        try:
            _export(setting, path)
        except Exception as error:
            raise Unavailable(f"the model does not export to ONNX: {first_line(error)}") from error
    return path


def _export(setting: Setting, path: Path) -> None:
    import torch

    model = _load_model(setting.folder, "cpu", {"torch_dtype": torch.float32}).eval()

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model({"input_ids": input_ids, "attention_mask": attention_mask})[
                "sentence_embedding"
            ]

    ids = torch.arange(14).reshape(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    axes = {0: "batch", 1: "length"}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter prints to standard output, whose last line is the benchmark's document.
    with (
        torch.inference_mode(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Whole().eval(),
            (ids, mask),
            dynamo=True,
            verbose=False,
            input_names=["input_ids", "attention_mask"],
            output_names=["sentence_embedding"],
            dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        )
        assert program is not None
        program.save(path)


def _require(*modules: str) -> None:
    """Raises `Unavailable` when a module is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise Unavailable(f"{module} is not installed")


def _best_batch_size(setting: Setting, encode: Callable[[int], object]) -> int:
    """The batch size that takes the least time on the pilot texts."""

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        encode(size)
        return time.perf_counter() - begun

    encode(setting.batch_sizes[0])
    return min(setting.batch_sizes, key=seconds)
