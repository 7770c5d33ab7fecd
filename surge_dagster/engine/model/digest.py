"""The digest of a model: one SHA-256 over its own files, which are its weights, configuration and
tokenizer.

Folders with the same files share a vector space, wherever they are: a hub snapshot, a pip package,
a copy. A model that another version of a library has saved again has other files, and is another
model here.

Reading 90 MB takes a third of a second and reading 10 GB half a minute, so the SHA-256 of each file
is kept on disk by path, size, modification time, inode and change time. A program can set the
modification time back after it replaced the content, but not the change time.

A model may bring code: Python files in its folder, which run only if a setting names them. A model
of the hub is named by the full commit of its repository, so that code and weights are those that
were read. A local folder has no commit; it is named by the digest of its Python files, which the
refusal of such a model says. The digest of the code is part of the model's digest, and so of the
name of the space.
"""

from __future__ import annotations

import hashlib
import json
import re
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
COMMIT_DIGITS = 40
TRUSTED = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS}}}|[0-9a-f]{{64}}")
EXPECTED = (
    "expected the full commit of the model's repository (40 hex digits), or for a model in a local "
    "folder the digest of its code (64 hex digits), which the refusal of the model says"
)


class UntrustedCode(ConfigError):
    """A model that needs code which no setting trusts."""


def model_digest(files: Iterable[Path], root: Path, code: str | None = None) -> str:
    """Return the SHA-256 (hex) over the names and contents of files below `root`, and over `code`
    if it is run."""
    document: dict[str, Any] = {
        "format": 2,
        "files": {path.relative_to(root).as_posix(): file_sha256(path) for path in files},
    }
    if code is not None:
        document["code"] = code
    return json_sha256(document)


def own_files(folder: Path) -> set[Path]:
    """Return the files of a module's folder that shape a vector; those of folders in it belong to
    other modules."""
    return {path for pattern in _OWN_FILES for path in folder.glob(pattern) if path.is_file()}


def json_sha256(document: object) -> str:
    """Return the SHA-256 (hex) of a document's one JSON text: sorted keys, no spaces, ASCII."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


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


def has_code(folder: Path) -> bool:
    return any(folder.rglob("*.py"))


def trusted_code(folder: Path, trusted: str | None) -> str | None:
    """Return the digest of the code in a model's folder; None if `trust_remote_code` names none."""
    if trusted is None:
        return None
    if not TRUSTED.fullmatch(trusted):
        raise ConfigError(f"trust_remote_code is {trusted!r}: {EXPECTED}")
    if not has_code(folder):
        raise ConfigError(
            f"{folder} has no Python files, so there is no code to trust: "
            "leave trust_remote_code out"
        )
    mapped: Any = (read_document(folder / "config.json") or {}).get("auto_map") or {}
    elsewhere = sorted({name for name in map(str, mapped.values()) if "--" in name})
    if elsewhere:
        raise ConfigError(
            f"{folder / 'config.json'} names code in another repository ({', '.join(elsewhere)}), "
            "which is not loaded: copy the model and that repository's Python files into one "
            "folder, and remove the part before `--`"
        )
    digest = _digest(folder)
    present = folder.name if is_snapshot(folder) else digest
    if present != trusted:
        raise ConfigError(
            f"trust_remote_code is {trusted}, and the code in {folder} is {present}: {EXPECTED}"
        )
    return digest


def untrusted(folder: Path, why: str) -> UntrustedCode:
    """The error that says how a model's code is trusted."""
    if is_snapshot(folder):
        value = f"the full commit of its repository, {folder.name}"
    elif has_code(folder):
        value = f"the digest of its code, {_digest(folder)}"
    else:
        return UntrustedCode(
            f"{folder} {why}, and it has no Python files: copy the model again, with all its files"
        )
    return UntrustedCode(
        f"{folder} {why}. Such code may do anything: read it, and if you trust it set "
        f"trust_remote_code to {value}; or use another model"
    )


def is_snapshot(folder: Path) -> bool:
    """Whether this is a commit of a repository in the hub's cache."""
    return folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")


def _digest(folder: Path) -> str:
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in folder.rglob("*.py")}
    return json_sha256(files)
