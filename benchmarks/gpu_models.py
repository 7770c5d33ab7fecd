"""Models of the shapes that the benchmarks measure, and the folder to take to a GPU machine.

python -m benchmarks.gpu_models FOLDER [MODEL]
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer, under the names that transformers' configs have for them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int

    def quick(self) -> Shape:
        """Return the same kind of model, small."""
        return replace(
            self,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )


@dataclass(frozen=True)
class CausalShape(Shape):
    """A decoder, whose text's vector is that of its last token."""

    num_key_value_heads: int
    head_dim: int

    def quick(self) -> Shape:
        return replace(super().quick(), num_key_value_heads=2, head_dim=16)


SHAPES = {
    "minilm": Shape(384, 1536, 6, 12),
    "bge-base": Shape(768, 3072, 12, 12),
    "e5-large": Shape(1024, 4096, 24, 16),
    # As https://huggingface.co/Qwen/Qwen3-Embedding-0.6B/blob/main/config.json has it.
    "qwen3-0.6b": CausalShape(1024, 3072, 28, 16, 8, 128),
}
_ROOT = Path(__file__).parent.parent


def make_model(
    folder: Path,
    shape: Shape,
    tokenizer_of: Path,
    device: str = "cpu",
    kind: str = "float32",
) -> None:
    """Write a BERT or Qwen3 of this shape with random weights; speed depends on the shape only."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Normalize,
        Pooling,
        Transformer,
    )
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    plain = folder.with_name(f"{folder.name}-plain")
    torch.manual_seed(0)
    sizes: dict[str, Any] = asdict(shape)
    with torch.device(device):
        if isinstance(shape, CausalShape):
            pooling = "lasttoken"
            # The vocabulary is that of the tokenizer, a fifth of Qwen3's, which costs no time.
            model = Qwen3Model(Qwen3Config(vocab_size=30_522, pad_token_id=0, **sizes))
        else:
            pooling = "mean"
            model = BertModel(BertConfig(**sizes))
        model.to(getattr(torch, kind)).save_pretrained(plain)
    for pattern in ("*token*", "vocab*"):
        for file in tokenizer_of.glob(pattern):
            shutil.copy(file, plain)
    modules = [
        Transformer(str(plain), max_seq_length=512),
        Pooling(shape.hidden_size, pooling),
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
