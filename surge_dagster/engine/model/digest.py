"""The digest of a model: one SHA-256 over its own files, which are its weights, configuration and
tokenizer.

Folders with the same files share a vector space, wherever they are: a hub snapshot, a pip package,
a copy. A model that another version of a library has saved again has other files, and is another
model here.

Reading 90 MB takes a third of a second and reading 10 GB half a minute, so the SHA-256 of each file
is kept on disk by path, size, modification time, inode and change time. A program can set the
modification time back after it replaced the content, but not the change time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support import disk_cache

# What sentence-transformers and transformers read of a folder. Other files, such as a README, shape
# no vector, and the prompts and the dimension in config_sentence_transformers.json are in the
# encoding spec by themselves.
_OWN_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "modules.json",
    "sentence_*_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def model_digest(files: Iterable[Path], root: Path, code: str | None = None) -> str:
    """Return the SHA-256 (hex) over the names and contents of files below `root`, and over `code`
    if it is run."""
    document: dict[str, Any] = {
        "format": 2,
        "files": {path.relative_to(root).as_posix(): file_sha256(path) for path in files},
    }
    if code is not None:
        document["code"] = code
    return hashlib.sha256(canonical_json(document)).hexdigest()


def own_files(folder: Path) -> set[Path]:
    """Return the files of a module's folder that shape a vector; those of folders in it belong to
    other modules."""
    return {path for pattern in _OWN_FILES for path in folder.glob(pattern) if path.is_file()}


def canonical_json(document: object) -> bytes:
    """The one JSON text of a document: sorted keys, no spaces, ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def read_document(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None when there is no such file; `ConfigError` when it is not
    JSON."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); download the model again"
        ) from error
    return document if isinstance(document, dict) else None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes, from the disk cache while the file stays the
    same."""
    real = path.resolve()
    status = real.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]
    place = f"digests/{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"

    known = disk_cache.read_json(place)
    if known is not None and known.get("file") == identity and "sha256" in known:
        return known["sha256"]

    digest = sha256_of(path)
    disk_cache.write_json(place, {"file": identity, "sha256": digest})
    return digest


def sha256_of(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
