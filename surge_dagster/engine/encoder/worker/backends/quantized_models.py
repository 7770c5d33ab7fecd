"""Converted models whose matrix products are in int8, made by NNCF's post-training quantization and kept on disk.

Weights get a scale per channel; the range of every activation is taken from a pass over built-in texts, one at a time.
So the same model, libraries and kind of machine give the same quantized model, whatever the catalog holds, and
vectors that do not depend on what a text is batched with, up to a rounding that falls the other way.

Weights use seven of the eight bits. Without VNNI a CPU adds two products in sixteen bits, and full weights overflow
them: the demo model's vectors then differed from exact arithmetic by cosines down to 0.9955, with seven bits by 0.9995.
So CPUs with VNNI and without give the same vectors within the floor that `verify` asks for; the price is 0.003 to 0.005
of the mean cosine to fp32.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.worker.backends.calibration_texts import calibration_texts
from surge_dagster.engine.encoder.worker.backends.converted_models import converted_model
from surge_dagster.engine.encoder.worker.backends.kept_models import kept_model, kept_tokenizer, save_model
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.fingerprint import cache_key, library_version, processor
from surge_dagster.engine.model.spec import Space

_CALIBRATION_TEXTS = 80


def quantized_model(space: Space) -> AbstractContextManager[Path]:
    """A folder with the quantized model of an int8 space: from the cache, or made now.

    Raises:
        ConfigError: NNCF is not installed, or the model cannot be converted or quantized.
    """
    version = library_version("nncf")
    if not version:
        raise ConfigError('precision int8 needs NNCF: pip install "surge-dagster[cpu,int8]"')
    key = cache_key("int8", space.spec_sha256, version, processor())
    return kept_model("openvino-int8", key, space.name, lambda folder: _quantize(space, folder))


def _quantize(space: Space, folder: Path) -> dict[str, Any]:
    import nncf
    import openvino as ov
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

    nncf.set_log_level(logging.ERROR)
    with converted_model(space.in_float()) as converted:
        facts = kept_tokenizer(converted)
        shutil.copyfile(converted / "tokenizer.json", folder / "tokenizer.json")
        quantized = nncf.quantize(
            ov.Core().read_model(converted / "model.xml"),
            nncf.Dataset(_calibration_inputs(TextTokenizer.for_space(facts, space))),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=_CALIBRATION_TEXTS,
            advanced_parameters=AdvancedQuantizationParameters(overflow_fix=OverflowFix.ENABLE),
        )
    save_model(quantized, folder)
    return {"truncation_side": facts.truncation_side, "pad_id": facts.pad_id}


def _calibration_inputs(tokenizer: TextTokenizer) -> list[dict[int, np.ndarray]]:
    """The model's two inputs by number, a text each: without padding, which no range should follow from."""
    tokens = tokenizer.encode(calibration_texts(_CALIBRATION_TEXTS))
    rows = [(np.array([row]), int(length)) for row, length in enumerate(tokens.lengths)]
    return [dict(enumerate(tokens.gather(row, length))) for row, length in rows if length]
