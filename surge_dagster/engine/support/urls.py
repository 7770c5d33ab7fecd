"""SOURCE and OUTPUT arguments: local paths and URLs."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.keys import is_text, printable

# obstore opens these by URL; the host names the bucket.
OBJECT_STORE_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "memory"})
_SCHEMES = OBJECT_STORE_SCHEMES | {"file", "http", "https"}


def is_object_store(url: str | Path) -> bool:
    """Whether an argument names a bucket instead of a local folder."""
    scheme, mark, _ = str(url).partition("://")
    return bool(mark) and scheme in OBJECT_STORE_SCHEMES


def to_uri(place: str) -> str:
    """Return the URI of a local path; that of an object is its URL."""
    if is_object_store(place) or place.startswith("file://"):
        return place
    return expanded(place).absolute().as_uri()


def split_url(url: str, *, what: str) -> SplitResult:
    """Return the parts of a URL; an error does not show it, since it may hold a password."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            f"the {what} is no URL ({error}); expected something like s3://bucket/path"
        ) from None


def is_bare(url: str) -> bool:
    """Return whether a URL has no user, query or fragment, which may hold secrets."""
    if "://" not in url:
        return True
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return "@" not in parts.netloc and not parts.query and not parts.fragment


def expanded(path: str) -> Path:
    """Return a path with `~` replaced; unchanged if the user has no home folder."""
    return Path(os.path.expanduser(path))  # noqa: PTH111, as Path's own raises


def local_path(url: str | Path, *, what: str) -> Path:
    """Return the absolute local path behind a path or `file://` URL."""
    text = str(url)
    if not text.strip():
        raise ConfigError(f"the {what} is empty: give a path or a URL.")
    if not is_text(text):
        raise ConfigError(
            f"cannot open {what} {printable(text)!r}: the path is not UTF-8. Rename it, or give "
            "another."
        )
    if "://" not in text:
        scheme, colon, _ = text.partition(":")
        if colon and scheme.lower() in _SCHEMES:
            # The message does not show the rest: it may hold a password.
            raise ConfigError(
                f"the {what} begins with {scheme}: but is no URL: expected {scheme}://, or "
                f"./{scheme}: for a folder of that name."
            )
        path = expanded(text)
        if text.startswith("~") and not path.is_absolute():
            raise ConfigError(
                f"cannot open {what} {printable(text)!r}: there is no such home folder. Give the "
                "whole path."
            )
        return path.absolute()
    parts = split_url(text, what=what)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"  # the rest may hold a password
    buckets = "" if what == "folder" else ", or a bucket: s3://, gs:// or az://"
    raise ConfigError(
        f"cannot open {what} {shown!r}: expected a local path or a file:// URL{buckets}."
    )
