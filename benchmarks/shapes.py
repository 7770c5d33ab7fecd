"""Models of known shapes with random weights: speed depends on the shape alone, and nothing has to be downloaded.

The tokenizer is the demo model's, so texts have the same tokens on every shape.
"""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.model.spec import EncodingSpec

# hidden size, intermediate size, layers, heads
SHAPES = {"bge-base": (768, 3_072, 12, 12), "e5-large": (1_024, 4_096, 24, 16)}


def write_model(name: str, folder: Path) -> str:
    """A sentence-transformers folder with a BERT of this shape, mean pooling and normalization; its path."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    hidden, intermediate, layers, heads = SHAPES[name]
    demo = EncodingSpec().resolve().model_path
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo, local_files_only=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=512,
    )
    plain = folder / "plain"
    BertModel(config).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    transformer = Transformer(str(plain), max_seq_length=512)
    model = SentenceTransformer(modules=[transformer, Pooling(hidden, "mean"), Normalize()], device="cpu")
    model.save(str(folder / name))
    return str(folder / name)
