"""Peers that run an ONNX file: onnxruntime itself, and fastembed, on the same fp32 export of the whole model.

Both are imported by name when they take part: neither belongs to what this project needs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import load_tokenizer
from benchmarks.peers import Setting, Unavailable, best_batch_size, load_model, require
from surge_dagster.engine.model.fingerprint import usable_cores


def exported(setting: Setting) -> Path:
    """The model as one ONNX file (transformer, pooling, normalization); made once."""
    require("onnxruntime", "onnx", "onnxscript")
    path = setting.onnx_file
    if not path.exists():
        try:
            _export(setting, path)
        except Exception as error:
            raise Unavailable(f"the model does not export to ONNX: {_first_line(error)}") from error
    return path


def _export(setting: Setting, path: Path) -> None:
    import torch

    model = load_model(setting.folder, "cpu", {"torch_dtype": torch.float32}).eval()

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]

    ids = torch.arange(14).reshape(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    axes = {0: "batch", 1: "length"}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter talks to standard output, whose last line is this benchmark's document.
    with torch.inference_mode(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
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


def _providers(device: str) -> list[str]:
    onnxruntime = import_module("onnxruntime")
    if device == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Unavailable("this onnxruntime is a build without CUDA")
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


class OnnxRuntime:
    """onnxruntime on texts sorted by length, as sentence-transformers sorts them, with all cores in one pass."""

    precision = "fp32"

    def __init__(self, setting: Setting) -> None:
        path = exported(setting)
        onnxruntime = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = usable_cores()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(path, options, providers=_providers(setting.device))
        self._tokenizer = load_tokenizer(setting.space)
        self._tokenizer.enable_truncation(setting.space.max_length)
        self._tokenizer.enable_padding(pad_id=self._tokenizer.token_to_id("[PAD]") or 0)
        self._dimension = setting.space.dimension
        self.batch_size = 0
        self.batch_size = best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

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


class FastEmbed:
    """fastembed with the same ONNX file as a custom model, which pools and normalizes by itself."""

    precision = "fp32"
    _registered = 0

    def __init__(self, setting: Setting) -> None:
        require("fastembed")
        path = exported(setting)
        (setting.folder / path.name).symlink_to(path)
        description = import_module("fastembed.common.model_description")
        text_embedding = import_module("fastembed").TextEmbedding
        FastEmbed._registered += 1
        name = f"benchmark/model-{FastEmbed._registered}"
        text_embedding.add_custom_model(
            model=name,
            pooling=description.PoolingType.DISABLED,
            normalization=False,
            sources=description.ModelSource(hf=name),
            dim=setting.space.dimension,
            model_file=path.name,
        )
        self._model: Any = text_embedding(
            name,
            specific_model_path=str(setting.folder),
            providers=_providers(setting.device),
            threads=usable_cores(),
        )
        self.batch_size = 0
        self.batch_size = best_batch_size(setting, lambda size: self.encode(setting.pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return np.stack(list(self._model.embed(texts, batch_size=batch_size or self.batch_size)))

    def close(self) -> None:
        del self._model


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
