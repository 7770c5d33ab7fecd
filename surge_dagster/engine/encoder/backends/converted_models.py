"""Models converted for OpenVINO, on disk: made once, checked on each use, forgotten when nobody uses them.

The whole sentence-transformers module (transformer, pooling, normalization) is converted and kept beside its tokenizer;
later starts read these files and import neither torch nor sentence-transformers, which is most of what a start costs.
A folder belongs to one space, one revision of this package and one set of library versions.

A model that cannot be converted is kept too, as the reason why: the next start says the same at once instead of loading
the model to fail again. Reasons that may go away by themselves (memory, disk, a missing package) are not. Whatever was
not used for 30 days is removed when another model is converted.
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

from surge_dagster.engine.encoder import disk_cache
from surge_dagster.engine.encoder.fingerprint import cache_key
from surge_dagster.engine.encoder.model_digest import file_sha256, read_document
from surge_dagster.engine.encoder.pass_loop import is_out_of_memory
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import ConfigError

_FOLDER = "openvino"
_FILES = ("model.xml", "model.bin", "tokenizer.json")
_FACTS = "facts.json"
_REFUSED = ".refused.json"
_KEEP_UNUSED_SECONDS = 30 * 24 * 3_600
_LONGEST_REASON = 2_000


@contextlib.contextmanager
def converted_model(space: Space) -> Iterator[Path]:
    """A folder with the converted model: from the cache, or made now, in the cache where that can be written.

    Raises:
        ConfigError: the model cannot be converted; the reason is the same on every start.
    """
    key = cache_key(space.spec_sha256, space.normalize)
    folder = disk_cache.cache_root() / _FOLDER / key
    if not _usable(folder):
        _raise_kept_refusal(key)
        # Workers that start together convert once.
        with disk_cache.lock(f"{_FOLDER}/.lock") as locked:
            if not locked:
                with tempfile.TemporaryDirectory() as aside:
                    _convert(space, Path(aside))
                    yield Path(aside)
                return
            if not _usable(folder):
                _raise_kept_refusal(key)
                _make(space, key, folder)
    yield folder


def _make(space: Space, key: str, folder: Path) -> None:
    """Converts into the cache; only under the lock."""
    root = folder.parent
    _forget_unused(root)
    aside = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
    try:
        _convert(space, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)
    except Exception as error:
        if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__)[:_LONGEST_REASON]
        disk_cache.write_json(f"{_FOLDER}/{key}{_REFUSED}", {"reason": reason, "space": space.name})
        raise ConfigError(reason) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _raise_kept_refusal(key: str) -> None:
    kept = disk_cache.read_json(f"{_FOLDER}/{key}{_REFUSED}")
    if kept is not None and isinstance(kept.get("reason"), str):
        raise ConfigError(kept["reason"])


def _forget_unused(root: Path) -> None:
    """Removes what a killed process left half made, and models and refusals that were not used for long."""
    oldest = time.time() - _KEEP_UNUSED_SECONDS
    for left_behind in root.glob(".making-*"):  # under the lock it is nobody's
        shutil.rmtree(left_behind, ignore_errors=True)
    for facts in root.glob(f"*/{_FACTS}"):
        if _modified(facts) < oldest:
            shutil.rmtree(facts.parent, ignore_errors=True)
    for refusal in root.glob(f"*{_REFUSED}"):
        if _modified(refusal) < oldest:
            refusal.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _usable(folder: Path) -> bool:
    """Whether the files are those that were written: a damaged cache must not give damaged vectors.

    A folder that is looked at counts as used from now on, so that no other process removes it meanwhile.
    """
    facts = folder / _FACTS
    with contextlib.suppress(OSError):
        os.utime(facts)
    try:
        document = read_document(facts)
        return document is not None and all(file_sha256(folder / name) == document["sha256"][name] for name in _FILES)
    except (OSError, KeyError, ConfigError):
        return False


def _convert(space: Space, folder: Path) -> None:
    import openvino as ov
    import torch

    from surge_dagster.engine.encoder.sentence_model import embedder, load_reference, tokenizer_facts

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
    ov.save_model(converted, folder / "model.xml", compress_to_fp16=False)
    (folder / "tokenizer.json").write_text(facts.tokenizer_json)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in _FILES}
    document = {
        "space": space.name,
        "truncation_side": facts.truncation_side,
        "pad_id": facts.pad_id,
        "sha256": digests,
    }
    (folder / _FACTS).write_text(json.dumps(document, indent=1))
    for name in (*_FILES, _FACTS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
