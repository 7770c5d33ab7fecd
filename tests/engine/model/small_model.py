"""The folder of a model that can be resolved and has a digest, and that no library can load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def model_folder(folder: Path) -> Path:
    """Make a folder that looks like a sentence-transformers model, with two small tensors."""
    (folder / "1_Pooling").mkdir(parents=True)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listing = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listing))
    (folder / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 16, "do_lower_case": false}'
    )
    (folder / "config.json").write_text(
        '{"model_type": "bert", "hidden_size": 8, "max_position_embeddings": 32}'
    )
    (folder / "tokenizer.json").write_text(
        '{"version": "1.0", "truncation": {"max_length": 9}, "model": {}}'
    )
    (folder / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 8, "pooling_mode_mean_tokens": true, '
        '"pooling_mode_cls_token": false}'
    )
    save_file(small_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def small_tensors() -> dict[str, np.ndarray]:
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}
