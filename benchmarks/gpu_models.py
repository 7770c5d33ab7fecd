"""Models of the shapes that the GPU benchmark measures, and the folder to take to a GPU machine.

python -m benchmarks.gpu_models FOLDER [MODEL]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

_ROOT = Path(__file__).parent.parent


def make_model(
    folder: Path, shape: tuple[int, int, int, int], tokenizer_of: Path, device: torch.device
) -> None:
    """A BERT with random weights in fp16; hidden size, inner size, layers, heads."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
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
    with device:
        BertModel(config).half().save_pretrained(plain)
    for pattern in ("*token*", "vocab*"):
        for file in tokenizer_of.glob(pattern):
            shutil.copy(file, plain)
    modules = [Transformer(str(plain), max_seq_length=512), Pooling(hidden, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))


def carry(folder: Path, model: Path) -> None:
    """What the benchmark needs beside the packages: in this folder it is `python -m benchmarks.gpu
    --model model`."""
    from safetensors.torch import load_file, save_file

    for name in ("surge_dagster", "benchmarks"):
        shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(model, folder / "model")
    weights = load_file(model / "model.safetensors")
    halves = {name: one.half() if one.is_floating_point() else one for name, one in weights.items()}
    save_file(halves, folder / "model" / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        from surge_dagster.engine.model.spec import EncodingSpec

        sys.argv.append(EncodingSpec().resolve().model_path)
    carry(Path(sys.argv[1]), Path(sys.argv[2]))
