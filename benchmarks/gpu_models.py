"""Models of the shapes that the benchmarks measure, and the folder to take to a GPU machine.

python -m benchmarks.gpu_models FOLDER [MODEL]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

# Hidden size, inner size, layers, heads.
SHAPES = {
    "minilm": (384, 1536, 6, 12),
    "bge-base": (768, 3072, 12, 12),
    "e5-large": (1024, 4096, 24, 16),
}
_ROOT = Path(__file__).parent.parent


def make_model(
    folder: Path,
    shape: tuple[int, int, int, int],
    tokenizer_of: Path,
    device: str = "cpu",
    kind: str = "float32",
) -> None:
    """Write a BERT of this shape with random weights; speed depends on the shape only."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Normalize,
        Pooling,
        Transformer,
    )
    from transformers import BertConfig, BertModel

    hidden, inner, layers, heads = shape
    plain = folder.with_name(f"{folder.name}-plain")
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    with torch.device(device):
        BertModel(config).to(getattr(torch, kind)).save_pretrained(plain)
    for pattern in ("*token*", "vocab*"):
        for file in tokenizer_of.glob(pattern):
            shutil.copy(file, plain)
    modules = [
        Transformer(str(plain), max_seq_length=512),
        Pooling(hidden, "mean"),
        Normalize(),
    ]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))


def carry(folder: Path, model: Path) -> None:
    """Write what the benchmark needs in addition to the packages: in this folder it is
    `python -m benchmarks.gpu --model model`."""
    from safetensors.torch import load_file, save_file

    for name in ("surge_dagster", "benchmarks"):
        shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(model, folder / "model")
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point():
            weights[name] = weight.half()
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        from surge_dagster.engine.model.spec import EncodingSpec

        sys.argv.append(EncodingSpec().resolve().model_path)
    carry(Path(sys.argv[1]), Path(sys.argv[2]))
