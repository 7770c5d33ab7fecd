"""Models converted for OpenVINO, in the disk cache: converted once, checked on each use, removed
after 30 unused days.

The whole sentence-transformers module is converted and stored with its tokenizer; later starts read
these files and import neither torch nor sentence-transformers, which is most of the cost of a
start. The SHA-256 of the files is stored with them and compared at every start (0.1 s for 90 MB),
because a failing disk changes neither times nor sizes.

A model that cannot be converted is cached too, as the reason: the next start reports it without
loading the model. It counts for that model folder only, because another one with the same digest
may lack what stopped the conversion. Reasons that may be temporary (memory, disk, a missing
package) are not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.calibration import cache_key
from surge_dagster.engine.encoder.worker.backends.base import is_out_of_memory
from surge_dagster.engine.encoder.worker.tokenization import TokenizerFacts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import canonical_json, read_document, sha256_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

_FOLDER = "openvino"
_FACTS = "facts.json"
_FILES = ("model.xml", "model.bin", "tokenizer.json")
_REFUSED = ".refused.json"
_KEEP_UNUSED_SECONDS = 30 * 24 * 3_600
_LONGEST_REASON = 2_000


@contextlib.contextmanager
def converted_model(space: Space) -> Iterator[Path]:
    """A folder with the converted fp32 model; ConfigError where it cannot be converted, on every
    start."""
    key = cache_key(space.vectors_key, space.normalize)
    folder = disk_cache.place(f"{_FOLDER}/{key}")
    refusal = f"{_FOLDER}/{cache_key(key, space.model_path)}{_REFUSED}"
    if not _usable(folder):
        _raise_cached_refusal(refusal)
        # Workers that start together convert once.
        with disk_cache.lock(f"{_FOLDER}/.lock") as locked:
            if not locked:
                with tempfile.TemporaryDirectory() as temporary:
                    _write_files(space, Path(temporary))
                    yield Path(temporary)
                return
            if not _usable(folder):
                _raise_cached_refusal(refusal)
                _convert_into_cache(space, folder, refusal)
    yield folder


def converted_tokenizer(folder: Path) -> TokenizerFacts:
    facts = read_document(folder / _FACTS) or {}
    return TokenizerFacts(
        (folder / "tokenizer.json").read_text(), facts["truncation_side"], facts["pad_id"]
    )


def _convert_into_cache(space: Space, folder: Path, refusal: str) -> None:
    """Only under the lock."""
    root = folder.parent
    _remove_unused(root)
    temporary = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
    try:
        _write_files(space, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except Exception as error:
        if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__)[:_LONGEST_REASON]
        disk_cache.write_json(refusal, {"reason": reason, "space": space.name})
        raise ConfigError(reason) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(space: Space, folder: Path) -> None:
    facts = {"space": space.name, **_convert(space, folder)}
    document = {**facts, "sha256": _digests(folder, facts)}
    (folder / _FACTS).write_text(json.dumps(document, indent=1))
    for name in (*_FILES, _FACTS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def _convert(space: Space, folder: Path) -> dict[str, Any]:
    """Returns the facts of the tokenizer that tokenizer.json does not hold."""
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


def _raise_cached_refusal(name: str) -> None:
    cached = disk_cache.read_json(name)
    if cached is not None and isinstance(cached.get("reason"), str):
        raise ConfigError(cached["reason"])


def _remove_unused(root: Path) -> None:
    oldest = time.time() - _KEEP_UNUSED_SECONDS
    for temporary in root.glob(".making-*"):  # the lock is held, so no process is writing it
        shutil.rmtree(temporary, ignore_errors=True)
    for used in (*root.glob(f"*/{_FACTS}"), *root.glob(f"*{_REFUSED}")):
        if used.stat().st_mtime < oldest:  # the lock is held, so no process removes it
            shutil.rmtree(used.parent, ignore_errors=True) if used.name == _FACTS else used.unlink(
                missing_ok=True
            )


def _usable(folder: Path) -> bool:
    """Also marks the folder as used, so that no other process removes it."""
    with contextlib.suppress(OSError):
        os.utime(folder / _FACTS)
    try:
        facts = read_document(folder / _FACTS) or {}
        return facts.pop("sha256", None) == _digests(folder, facts)
    except (OSError, ConfigError):
        return False


def _digests(folder: Path, facts: dict[str, Any]) -> dict[str, str]:
    return {name: sha256_of(folder / name) for name in _FILES} | {
        _FACTS: hashlib.sha256(canonical_json(facts)).hexdigest()
    }
