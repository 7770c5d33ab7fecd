"""Models made for OpenVINO, on disk: made once, checked on each use, forgotten when nobody uses them.

A folder belongs to one key: a space, a revision of this package and a set of library versions. Its files' digests are
beside them, because a damaged cache must not give damaged vectors.

A model that cannot be made is kept too, as the reason why: the next start says the same at once instead of loading
the model to fail again. Reasons that may go away by themselves (memory, disk, a missing package) are not. Whatever was
not used for 30 days is removed when another model of the same kind is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.worker.pass_loop import is_out_of_memory
from surge_dagster.engine.encoder.worker.tokenization import TokenizerFacts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import file_sha256, read_document
from surge_dagster.engine.support import disk_cache

_FACTS = "facts.json"
_FILES = ("model.xml", "model.bin", "tokenizer.json")
_REFUSED = ".refused.json"
_KEEP_UNUSED_SECONDS = 30 * 24 * 3_600
_LONGEST_REASON = 2_000

# Writes its files into a folder and gives what else there is to know of the tokenizer, for `facts.json`.
MakeModel = Callable[[Path], dict[str, Any]]


class KeptRefusal(ConfigError):
    """A model cannot be made, and that is remembered."""


@contextlib.contextmanager
def kept_model(kind: str, key: str, space_name: str, make: MakeModel) -> Iterator[Path]:
    """A folder with a model: from the cache, or made now, in the cache where that can be written.

    Args:
        kind: the cache's folder; each has a lock of its own, so that making one kind may need another.
        key: all that the model depends on.
        space_name: for people who look into the cache.
        make: called when there is no usable model.

    Raises:
        KeptRefusal: the model cannot be made; the reason is the same on every start.
    """
    folder = disk_cache.cache_root() / kind / key
    refusal = f"{kind}/{key}{_REFUSED}"
    if not _usable(folder):
        _raise_kept_refusal(refusal)
        # Workers that start together make it once.
        with disk_cache.lock(f"{kind}/.lock") as locked:
            if not locked:
                with tempfile.TemporaryDirectory() as aside:
                    _make_files(make, Path(aside), space_name)
                    yield Path(aside)
                return
            if not _usable(folder):
                _raise_kept_refusal(refusal)
                _make(make, folder, refusal, space_name)
    yield folder


def save_model(model: Any, folder: Path) -> None:
    """Writes an OpenVINO model into a folder.

    Raises:
        OSError: the disk did not take it; OpenVINO's own error does not tell this from a model that is wrong.
    """
    import openvino as ov

    try:
        ov.save_model(model, folder / "model.xml", compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(f"cannot write the converted model to {str(folder)!r}: {error}") from error


def kept_tokenizer(folder: Path) -> TokenizerFacts:
    """The tokenizer that lies beside a kept model."""
    facts = read_document(folder / _FACTS) or {}
    return TokenizerFacts((folder / "tokenizer.json").read_text(), facts["truncation_side"], facts["pad_id"])


def _make(make: MakeModel, folder: Path, refusal: str, space_name: str) -> None:
    """Makes a model in the cache; only under the lock."""
    root = folder.parent
    _forget_unused(root)
    aside = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
    try:
        _make_files(make, aside, space_name)
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)
    except Exception as error:
        # What one model is made of is remembered where it belongs, and not here as well.
        if isinstance(error, OSError | ImportError | KeptRefusal) or is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__)[:_LONGEST_REASON]
        disk_cache.write_json(refusal, {"reason": reason, "space": space_name})
        raise KeptRefusal(reason) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make_files(make: MakeModel, folder: Path, space_name: str) -> None:
    facts = make(folder)
    digests = {name: file_sha256(folder / name) for name in _FILES}
    document = {"space": space_name, **facts, "sha256": digests}
    (folder / _FACTS).write_text(json.dumps(document, indent=1))
    for name in (*_FILES, _FACTS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def _raise_kept_refusal(name: str) -> None:
    kept = disk_cache.read_json(name)
    if kept is not None and isinstance(kept.get("reason"), str):
        raise KeptRefusal(kept["reason"])


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
    """Whether the files are those that were written.

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
