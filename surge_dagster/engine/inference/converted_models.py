"""Models converted for OpenVINO, in the disk cache: converted once.

The whole sentence-transformers module is converted and stored with its tokenizer. Later starts read
these files and import neither torch nor sentence-transformers, which is most of the cost of a
start. They stay until somebody deletes the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.calibration import cache_key
from surge_dagster.engine.encoder.worker.tokenization import TokenizerFacts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import read_document
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

_FOLDER = "openvino"
_FACTS = "facts.json"
_FILES = ("model.xml", "model.bin", "tokenizer.json")


def converted_model(space: Space) -> Path:
    """Return the folder of the converted fp32 model.

    Raises:
        ConfigError: the model cannot be converted, or there is no cache for it.
    """
    folder = disk_cache.place(f"{_FOLDER}/{cache_key(space.vectors_key, space.normalize)}")
    if (folder / _FACTS).is_file():
        return folder
    # Workers that start together convert once.
    with disk_cache.lock(f"{_FOLDER}/.lock") as locked:
        if not locked:
            raise ConfigError(f"{folder.parent} cannot be written; set SURGE_CACHE_DIR")
        if not (folder / _FACTS).is_file():
            _convert_into_cache(space, folder)
    return folder


def converted_tokenizer(folder: Path) -> TokenizerFacts:
    facts = read_document(folder / _FACTS) or {}
    return TokenizerFacts(
        (folder / "tokenizer.json").read_text(), facts["truncation_side"], facts["pad_id"]
    )


def _convert_into_cache(space: Space, folder: Path) -> None:
    """Convert a model while no other process does."""
    root = folder.parent
    temporary = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
    try:
        _write_files(space, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(space: Space, folder: Path) -> None:
    facts = {"space": space.name, **_convert(space, folder)}
    (folder / _FACTS).write_text(json.dumps(facts, indent=1))
    for name in (*_FILES, _FACTS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def _convert(space: Space, folder: Path) -> dict[str, Any]:
    """Write a converted model; return what tokenizer.json does not hold of its tokenizer."""
    import torch

    from surge_dagster.engine.encoder.worker.sentence_model import load_reference
    from surge_dagster.engine.inference.model_parts import embedder, tokenizer_facts
    from surge_dagster.engine.inference.quiet_openvino import ov

    reference = load_reference(space, "cpu")
    facts = tokenizer_facts(reference, space)
    if facts is None:
        raise ConfigError("this model's texts do not go through a plain fast tokenizer")
    module = embedder(reference, space, facts.prompt_length)
    with torch.inference_mode():
        example = torch.arange(2 * 7).reshape(2, 7)
        # The mask hides tokens: tracing could leave out a mask of ones.
        mask = torch.ones_like(example)
        mask[0, 5:] = 0
        converted = ov.convert_model(
            module, example_input={"input_ids": example, "attention_mask": mask}
        )
    converted.reshape({place: ov.PartialShape([-1, -1]) for place in range(2)})
    try:
        ov.save_model(converted, folder / "model.xml", compress_to_fp16=False)
    except RuntimeError as error:
        # OpenVINO has no error of its own for a full disk.
        raise OSError(f"cannot write the converted model to {str(folder)!r}: {error}") from error
    (folder / "tokenizer.json").write_text(facts.tokenizer_json)
    return {"truncation_side": facts.truncation_side, "pad_id": facts.pad_id}
