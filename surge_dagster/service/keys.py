"""API keys: a file holds their SHA-256 digests, one in hex per line, so that it gives no key away."""

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
    after `#`, is a comment. Where all lines were taken out of a file that can be read, no key is
    accepted.

    Raises:
        ConfigError: the file cannot be read, has no digest, or a line that is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = ()
        self._digests: list[str] = []
        self._read()

    def accept(self, key: bytes) -> bool:
        """Whether this is one of the keys; the empty one, whose digest an unset `$KEY` gives, never
        is."""
        try:
            self._read()
        except ConfigError as error:
            log.warning("%s; the keys stay as they were", error)
        digest = hashlib.sha256(key).hexdigest()
        # all are compared
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0 and key != b""

    def _read(self) -> None:
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_size, status.st_ino
        except OSError:
            seen = None
        if seen == self._seen:
            return
        is_first, self._seen = self._seen == (), seen
        try:
            lines = [
                line.split("#")[0].split()
                for line in self._path.read_text("utf-8-sig").splitlines()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys in {self._path} cannot be read: {error}") from None
        digests = {number: words[0].lower() for number, words in enumerate(lines, 1) if words}
        wrong = next(
            (number for number, digest in digests.items() if not _DIGEST.fullmatch(digest)), None
        )
        if wrong or (is_first and not digests):
            came = f"line {wrong} is none" if wrong else "it has none"
            raise ConfigError(
                f"{self._path}: expected the SHA-256 of an API key in hex in each line, and {came}. "
                'Make one with: printf %s "$KEY" | sha256sum'
            )
        self._digests = list(digests.values())
