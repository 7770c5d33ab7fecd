"""API keys: a file has their SHA-256 digests, one in hex per line, so that it gives no key away."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path

from surge_dagster.engine.errors import ConfigError

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ApiKeys:
    """The keys of a file, which is read again when it has changed; a change that makes it wrong is
    logged and ignored.

    A line is a digest, as in the output of `printf %s "$KEY" | sha256sum`; what follows it, and all
    after `#`, is a comment. If all lines are taken out of the file later, no key is accepted.

    Raises:
        ConfigError: the file cannot be read, or has no digest or a wrong line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._version()
        self._digests = self._read()
        if not self._digests:
            raise self._wrong("It has no line")

    def accept(self, key: bytes) -> bool:
        """Whether this is one of the keys; the empty one, whose digest an unset `$KEY` gives, never
        is."""
        version = self._version()
        if version != self._seen:
            self._seen = version
            try:
                self._digests = self._read()
            except ConfigError as error:
                log.warning("%s The keys stay as they were.", error)
        digest = hashlib.sha256(key).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key != b"" and any(matches)

    def _version(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _read(self) -> list[str]:
        try:
            lines = self._path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API keys in {self._path} cannot be read: {error}.") from None
        digests = list[str]()
        for number, line in enumerate(lines, 1):
            words = line.split("#")[0].lower().split()
            if not words:
                continue
            if not _DIGEST.fullmatch(words[0]):
                raise self._wrong(f"Line {number} is not a SHA-256 in hex")
            digests.append(words[0])
        return digests

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: {problem}. Each line has the SHA-256 of an API key in hex; make one "
            'with: printf %s "$KEY" | sha256sum'
        )
