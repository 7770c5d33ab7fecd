"""Other libraries on the same texts, each with the best of three batch sizes.

The table shows what a peer raises that is not installed or cannot run here. All peers load one
folder: the pool's model with the workload's maximum length in its files, so that they read equally
many tokens of a text.
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
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np

from benchmarks.encode.inputs import load_tokenizer, token_lengths
from benchmarks.harness import seconds_of
from surge_dagster.engine.encoder.devices import usable_cores
from surge_dagster.engine.model.spec import Space

_BATCH_SIZES = (16, 32, 128)
_PRODUCT_ROWS = 2_048


@dataclass(frozen=True, slots=True)
class Setting:
    """The input of every peer.

    Attributes:
        folder: the model, with the space's maximum length in its files.
        pilot: texts with which the batch size is found.
    """

    space: Space
    folder: Path
    pilot: list[str]


class Peer(Protocol):
    """Text in; vectors in host memory, or seconds if there are no vectors. `batch_size` is 0 if it
    cannot be chosen."""

    batch_size: int

    def encode(self, texts: list[str]) -> np.ndarray | float: ...

    def close(self) -> None: ...


def peer_folder(space: Space, folder: Path) -> Path:
    """Copy the space's model, with the space's maximum length in its files."""
    shutil.copytree(space.model_path, folder)
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        path = folder / name
        if path.exists():
            settings = json.loads(path.read_text())
            settings[key] = space.max_length
            path.write_text(json.dumps(settings))
    return folder


class SentenceTransformers:
    """`SentenceTransformer.encode` in fp32."""

    def __init__(self, setting: Setting) -> None:
        self._model = _load_model(setting.folder)
        self.batch_size = _best_batch_size(self.encode, setting.pilot)

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(
            texts, batch_size=batch_size or self.batch_size, show_progress_bar=False
        )

    def close(self) -> None:
        del self._model


class SentenceTransformersPool:
    """sentence-transformers' multi-process pool: a process per core."""

    def __init__(self, setting: Setting) -> None:
        cores = usable_cores()
        self._model = _load_model(setting.folder)
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):
            self._pool = self._model.start_multi_process_pool(["cpu"] * cores)
        for _ in range(cores):
            self._model.encode(setting.pilot[: 4 * cores], pool=self._pool, chunk_size=1)
        self.batch_size = _best_batch_size(self.encode, setting.pilot)

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(texts, pool=self._pool, batch_size=batch_size or self.batch_size)

    def close(self) -> None:
        self._model.stop_multi_process_pool(self._pool)


class OnnxRuntime:
    """onnxruntime on texts sorted by length, as sentence-transformers does it, with all cores in
    one pass."""

    def __init__(self, setting: Setting) -> None:
        onnxruntime = import_module("onnxruntime")
        path = setting.folder / "model.onnx"
        _export(setting, path)
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
        self.batch_size = _best_batch_size(self.encode, setting.pilot)

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        step = batch_size or self.batch_size
        order = np.argsort([-len(text) for text in texts], kind="stable")
        vectors = np.empty((len(texts), self._dimension), np.float32)
        for start in range(0, len(texts), step):
            rows = order[start : start + step]
            tokens = self._tokenizer.encode_batch_fast([texts[row] for row in rows])
            inputs = {
                "input_ids": np.array([text.ids for text in tokens], np.int64),
                "attention_mask": np.array([text.attention_mask for text in tokens], np.int64),
            }
            vectors[rows] = self._session.run(None, inputs)[0]
        return vectors

    def close(self) -> None:
        del self._session


class Daft:
    """Daft's `embed_text` with its provider "transformers", over a table in memory; its batch size
    is fixed."""

    batch_size = 0

    def __init__(self, setting: Setting) -> None:
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
    """Only the matrix products of the model's layers, on as many tokens: no encoder is faster."""

    batch_size = 0

    def __init__(self, setting: Setting, precision: str) -> None:
        import torch

        config = json.loads(next(setting.folder.glob("**/config.json")).read_text())
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self._space = setting.space
        self._layers = config["num_hidden_layers"]
        self._products = []
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        shapes = (
            (hidden, 3 * hidden),
            (hidden, hidden),
            (hidden, inner),
            (inner, hidden),
        )
        for inputs, outputs in shapes:
            states = torch.randn(_PRODUCT_ROWS, inputs).to(kind)
            self._products.append((states, torch.randn(outputs, inputs).to(kind)))
        self.encode(setting.pilot)

    def encode(self, texts: list[str]) -> float:
        """Return the seconds of the products."""
        import torch

        passes = token_lengths(self._space, texts).sum() / _PRODUCT_ROWS
        whole = max(1, round(passes))
        begun = time.perf_counter()
        for _ in range(whole * self._layers):
            for states, weights in self._products:
                torch.nn.functional.linear(states, weights)
        return float((time.perf_counter() - begun) * passes / whole)

    def close(self) -> None:
        self._products = []


def _load_model(folder: Path) -> Any:
    """Load a sentence-transformers model in fp32 from a folder, without any network."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    kinds = {"torch_dtype": torch.float32}
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs=kinds)


def _export(setting: Setting, path: Path) -> None:
    """Export the model as one ONNX file: transformer, pooling, normalization."""
    import torch

    model = _load_model(setting.folder).eval()

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            features = {"input_ids": input_ids, "attention_mask": attention_mask}
            return self.model(features)["sentence_embedding"]

    ids = torch.arange(14).reshape(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    axes = {0: "batch", 1: "length"}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter prints to standard output, whose last line is the benchmark's document.
    with (
        torch.inference_mode(),
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
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


def _best_batch_size(encode: Callable[[list[str], int], object], pilot: list[str]) -> int:
    """Return the batch size that takes the least time on the pilot texts."""
    encode(pilot, _BATCH_SIZES[0])
    return min(_BATCH_SIZES, key=lambda size: seconds_of(lambda: encode(pilot, size)))
