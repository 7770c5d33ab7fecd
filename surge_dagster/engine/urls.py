"""What a SOURCE or OUTPUT argument may be: a local path or a URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from surge_dagster.engine.errors import ConfigError


def local_path(url: str | Path, *, what: str) -> Path:
    """The absolute local path behind a path or `file://` URL.

    Raises:
        ConfigError: the URL names another kind of storage.
    """
    text = str(url)
    if "://" not in text:
        return Path(text).expanduser().absolute()
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    raise ConfigError(
        f"cannot open {what} {text!r}: expected a local path or a file:// URL. "
        "Object stores are not supported yet; mount the bucket or copy the files to a local folder."
    )
