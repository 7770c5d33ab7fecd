"""Models converted for OpenVINO, kept on disk.

The whole sentence-transformers module (transformer, pooling, normalization) is converted and kept beside its tokenizer;
later starts read these files and import neither torch nor sentence-transformers, which is most of what a start costs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.worker.backends.kept_models import kept_model, save_model
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.fingerprint import cache_key
from surge_dagster.engine.model.spec import Space


def converted_model(space: Space) -> AbstractContextManager[Path]:
    """A folder with the converted fp32 model: from the cache, or made now.

    Raises:
        ConfigError: the model cannot be converted; the reason is the same on every start.
    """
    key = cache_key(space.spec_sha256, space.normalize)
    return kept_model("openvino", key, space.name, lambda folder: _convert(space, folder))


def _convert(space: Space, folder: Path) -> dict[str, Any]:
    import openvino as ov
    import torch

    from surge_dagster.engine.encoder.worker.sentence_model import embedder, load_reference, tokenizer_facts

    reference = load_reference(space, "cpu")
    facts = tokenizer_facts(reference, space)
    if facts is None:
        raise ConfigError("this model's texts do not go through a plain fast tokenizer")
    module = embedder(reference, space, facts.prompt_length)
    with torch.inference_mode():
        example = torch.arange(2 * 7).reshape(2, 7)
        # A mask that hides something: with one of ones alone, tracing could leave it out.
        mask = torch.ones_like(example)
        mask[0, 5:] = 0
        converted = ov.convert_model(module, example_input={"input_ids": example, "attention_mask": mask})
    converted.reshape({place: ov.PartialShape([-1, -1]) for place in range(2)})
    save_model(converted, folder)
    (folder / "tokenizer.json").write_text(facts.tokenizer_json)
    return {"truncation_side": facts.truncation_side, "pad_id": facts.pad_id}
