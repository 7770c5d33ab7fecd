"""EndpointClient: sends requests to an encoder behind HTTP, and waits where the server is busy.

All requests share one clock: when one of them is told to wait, none is sent before that time. What
a status means:

| status or error | what follows |
| --- | --- |
| 200 | the answer is paid for: it is used or ends the run, and is never requested again |
| 400, 413, 422 | `InputsRefused`: the caller cuts the request in two |
| 429, 502 to 504, 529, a lost connection | tried again after a growing pause, or `Retry-After` |
| other 5xx, 424, no answer in time | tried again; `InputsRefused` at the fifth time |
| any other, such as 401, 403, 404 | `ConfigError`, and nothing else is sent |
| a certificate that is not trusted | `ConfigError`, and nothing is sent |

A server that encodes nothing for `patience_seconds`, or asks for a longer pause, ends the run.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from surge_dagster.engine.endpoint.answers import (
    Answer,
    UnusableAnswer,
    plausible_tokens,
    read_answer,
    request_body,
    shown,
)
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError, EndpointDown

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

_REFUSED_INPUTS = (400, 413, 422)
_BUSY = (408, 425, 429, 502, 503, 504, 529)
# Of a request whose failure one of the inputs may have caused.
SUSPICIOUS_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_MINUTE_SECONDS = 60.1  # timers may be early
_INSTALL = "An encoder behind HTTP needs httpx and aiolimiter: pip install 'surge-dagster[http]'."


class InputsRefused(Exception):
    """The server does not encode an input of a request, or all; the text is the reason.

    Attributes:
        is_suspicious: it failed, or did not answer in time; an input may be the cause.
    """

    is_suspicious = False


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a request was not answered.

    Attributes:
        pause_seconds: that the server asks for at least; 0 if it does not say.
        is_suspicious: one of the inputs may be the cause.
    """

    reason: str
    pause_seconds: float = 0.0
    is_suspicious: bool = False


class EndpointClient:
    """Sends requests from one event loop; use `async with`.

    Args:
        dimensions: that each request asks for; None leaves it to the model.
        fields: of `Endpoint.fields`, for the task.
        follows_another: another client, such as that of a worker that was killed, may have sent
            what the limits allow, so the first request waits.
        transport: in place of the network, for tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        fields: str,
        dimensions: int | None,
        *,
        follows_another: bool = False,
        transport: Any = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(_INSTALL) from error

        endpoint.require_url(model)
        self.model = model
        self.dimensions = dimensions
        self._endpoint = endpoint
        self._fields = fields
        self._limits = _Limits(endpoint, is_full=follows_another)
        self._ended: Exception | None = None
        self._not_before = 0.0
        self._failing_since: float | None = None
        self._has_warned = False
        key = endpoint.api_key()
        self._key = key
        self._http = httpx.AsyncClient(
            http2=True,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=None,  # `_try` limits a request as a whole
            limits=httpx.Limits(
                max_connections=endpoint.concurrency,
                max_keepalive_connections=endpoint.concurrency,
            ),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def embed(
        self,
        texts: Sequence[str],
        tokens: int,
        dimension: int | None = None,
        most_tries: int = SUSPICIOUS_TRIES,
    ) -> Answer:
        """Return the vectors of texts, which go in one request.

        Args:
            tokens: of all texts, about.
            dimension: of the vectors; None if it is not known yet.
            most_tries: if one of the texts may be why the server does not answer.

        Raises:
            InputsRefused: the server does not encode them.
            UnusableAnswer: its answer does not match the texts.
            ConfigError: the server refuses every request.
            EndpointDown: the server encodes nothing.
        """
        body = request_body(self.model, texts, self._fields, self.dimensions)
        tries = 0
        suspicious = 0
        while True:
            tries += 1
            outcome = await self._try(body, tokens)
            if isinstance(outcome, bytes):
                answer = read_answer(outcome, len(texts), dimension, self._key)
                return replace(answer, tokens=plausible_tokens(answer.tokens, texts))
            if outcome.is_suspicious:
                suspicious += 1
            if suspicious < most_tries:
                self._pause(outcome, tries)
                continue
            if most_tries == 1:
                self._require_patience(outcome, 0.0)
            else:
                self._failing_since = None  # an input may be the cause: the patience begins again
            refusal = InputsRefused(f"tried {suspicious} times: {outcome.reason}")
            refusal.is_suspicious = True
            raise refusal

    async def _try(self, body: Mapping[str, Any], tokens: int) -> bytes | _Trouble:
        """Send a request when it may be sent; return a 200's content, or why there is none."""
        import httpx

        await self._wait_for_turn(tokens)
        seconds = self._endpoint.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.post(f"{self._endpoint.url}/embeddings", json=body)
        except TimeoutError:
            return _Trouble(f"no answer within {seconds:g} s", is_suspicious=True)
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise self.end(self._untrusted(error)) from None
            return _Trouble(f"{type(error).__name__}: {error}")
        except httpx.DecodingError as error:
            raise UnusableAnswer(f"the answer cannot be decompressed: {error}") from None
        if response.status_code == 200:
            self._failing_since = None
            return response.content
        return self._trouble_of(response)

    async def _wait_for_turn(self, tokens: int) -> None:
        """Wait for the pause that the server asked for, and for the limits of a minute.

        A turn that comes during a pause is given up, else all would be sent at once after it.
        """
        clock = asyncio.get_running_loop().time
        is_allowed = False
        while not is_allowed:
            while (pause := self._not_before - clock()) > 0 and self._ended is None:
                await asyncio.sleep(pause)
            await self._limits.take(tokens)
            is_allowed = self._not_before <= clock()
            if self._ended is not None:
                raise self._ended

    def _trouble_of(self, response: httpx.Response) -> _Trouble:
        status = response.status_code
        reason = f"HTTP {status}: {shown(response.content, self._key)}"
        if status in _REFUSED_INPUTS:
            self._failing_since = None  # a server that refuses an input works
            raise InputsRefused(reason)
        pause = _retry_after(response.headers)
        if status in _BUSY:
            return _Trouble(reason, pause)
        if status >= 500 or status == 424:
            return _Trouble(reason, pause, is_suspicious=True)
        if response.has_redirect_location:
            place = shown(response.headers["Location"].encode(), self._key)
            reason = f"HTTP {status}: it has moved to {place}"
        raise self.end(
            ConfigError(
                f"the encoder at {self._endpoint.url} refuses requests for {self.model!r} "
                f"({reason}). Check encoder_url, model, and the key that encoder_api_key_env names."
            )
        )

    def _untrusted(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"the certificate of the encoder at {self._endpoint.url} is not trusted here "
            f"({error}). Correct encoder_url, or name the file of its authority in the environment "
            "variable SSL_CERT_FILE."
        )

    def _pause(self, trouble: _Trouble, tries: int) -> None:
        """Let no request be sent for a while.

        Raises:
            EndpointDown: the server encodes nothing, and the patience is over.
        """
        growing = _FIRST_PAUSE_SECONDS * 2 ** min(tries - 1, 10)
        seconds = max(trouble.pause_seconds, min(growing, _LONGEST_PAUSE_SECONDS))
        self._require_patience(trouble, seconds)
        now = asyncio.get_running_loop().time()
        self._not_before = max(self._not_before, now + seconds)

    def _require_patience(self, trouble: _Trouble, seconds: float) -> None:
        """Raise `EndpointDown` if the server encodes nothing, and the patience is over in so many
        seconds; the first trouble is a line of the log."""
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        patience = self._endpoint.patience_seconds
        if now + seconds - self._failing_since > patience:
            raise self.end(
                EndpointDown(
                    f"the encoder at {self._endpoint.url} has encoded nothing for "
                    f"{now - self._failing_since:.0f} s and would be tried again in {seconds:g} s; "
                    f"encoder_patience is {patience:g} s. Its last answer: {trouble.reason}. What "
                    "is published stays; run again when the server works."
                )
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the encoder at %s does not encode now (%s); it is tried for up to %g s",
                self._endpoint.url,
                trouble.reason,
                patience,
            )

    def end(self, error: Exception) -> Exception:
        """Let no further request be sent; return the first error for which that was so."""
        self._ended = self._ended or error
        return self._ended


class _Limits:
    """Requests and tokens per minute.

    Requests are spaced evenly, and the bucket of tokens is refilled at the limit less its size: so
    no minute has more than the limit, whenever it begins.

    Args:
        is_full: what may be sent at once was sent.
    """

    def __init__(self, endpoint: Endpoint, *, is_full: bool) -> None:
        self._is_full = is_full
        self._requests: Any = None
        self._tokens: Any = None
        self._bucket = 0.0
        try:
            from aiolimiter import AsyncLimiter
        except ImportError as error:
            raise ConfigError(_INSTALL) from error

        if endpoint.requests_per_minute is not None:
            self._requests = AsyncLimiter(1, _MINUTE_SECONDS / endpoint.requests_per_minute)
        if endpoint.tokens_per_minute is not None:
            self._bucket = token_bucket(endpoint)
            refill = endpoint.tokens_per_minute - self._bucket
            self._tokens = AsyncLimiter(self._bucket, _MINUTE_SECONDS * self._bucket / refill)

    async def take(self, tokens: int) -> None:
        if self._is_full:
            self._is_full = False
            await self._take(self._bucket)  # returns at once
        await self._take(float(tokens))

    async def _take(self, tokens: float) -> None:
        if self._tokens is not None:
            await self._tokens.acquire(min(tokens, self._bucket))
        if self._requests is not None:
            await self._requests.acquire()


def token_bucket(endpoint: Endpoint) -> float:
    """Return the most tokens that one request may take of a minute's."""
    if endpoint.tokens_per_minute is None:
        return float(endpoint.tokens)
    return min(float(endpoint.tokens), endpoint.tokens_per_minute / 2)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a `Retry-After`, which may be a date; 0 if there is none."""
    value = headers.get("Retry-After", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        at = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return 0.0
    if at.tzinfo is None:  # the form of asctime, which means GMT
        at = at.replace(tzinfo=datetime.UTC)
    return max(0.0, at.timestamp() - time.time())
