"""Code that a model brings: Python files in its folder, which run only if a setting names them.

A model of the hub is named by the full commit of its repository, so that code and weights are those
that were read. A local folder has no commit; it is named by the digest of its Python files, which
the refusal of such a model says. The digest of the code is part of the model's digest, and so of
the name of the space.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import canonical_json, read_document, sha256_of

COMMIT_DIGITS = 40
TRUSTED = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS}}}|[0-9a-f]{{64}}")
EXPECTED = (
    "expected the full commit of the model's repository (40 hex digits), or for a model in a local "
    "folder the digest of its code (64 hex digits), which the refusal of the model says"
)


class UntrustedCode(ConfigError):
    """A model that needs code which no setting trusts."""


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
    return hashlib.sha256(canonical_json(files)).hexdigest()
