"""HttpBackend: the vectors of an encoder behind HTTP.

A portion is cut into requests of consecutive texts, and as many requests as the endpoint allows
are under way; those of the next portion follow before the last ones of this one are answered. A
request that the server refuses is halved until a single text is left. That text has no vector,
its reason is in `Rows.refused`, and it is not sent again. If all of its parts are accepted, the
request was too large, and later ones are no larger than a half.

The last input of each request is a probe (`probes.py`): an answer of another model ends the run
before a vector of it is used.

Each answer is reported to the pool at once: of a lost worker only the requests under way are sent
again.

All of it runs in one event loop in a thread of its own, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    LaunchedPortion,
    Progress,
    Rows,
)
from surge_dagster.engine.encoder.worker.tokenization import load_tokenizer
from surge_dagster.engine.endpoint.answers import UnusableAnswer
from surge_dagster.engine.endpoint.client import (
    SUSPICIOUS_TRIES,
    EndpointClient,
    InputsRefused,
    token_bucket,
)
from surge_dagster.engine.endpoint.probes import written_probes
from surge_dagster.engine.errors import ConfigError, EndpointDown
from surge_dagster.engine.model.spec import Space

# After more refused texts of a portion than this, and than accepted ones, the probe shows whether
# the server is the cause. Those of portions before it without an accepted text count too.
_MOST_REFUSED = 64
_FIRST_TOKENS_PER_BYTE = 0.5  # until the first answer
_PROGRESS_SECONDS = 1.0
_ROUNDING = 1e-6  # of the length of a float32 vector


@dataclass(frozen=True, slots=True)
class CountedTexts:
    """The texts of a portion.

    Attributes:
        texts: with the prompt.
        tokens: of each text, int64; None without a tokenizer.
        truncated: whether the model reads only a part of each; all False without a tokenizer.
    """

    texts: list[str]
    tokens: np.ndarray | None
    truncated: np.ndarray


class HttpBackend:
    """See the module. Its client keeps the connections for the life of the worker."""

    name = "http"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        endpoint = space.requested.endpoint
        assert endpoint is not None
        self.detail = f"{space.requested.model} at {endpoint.host}"
        self._url = endpoint.url
        self._space = space
        probe = space.carried_probe
        self._probes = [] if probe is None else [probe]
        self._most_texts = endpoint.most_texts
        self._most_tokens = token_bucket(endpoint)
        self.portion_texts = endpoint.concurrency * self._most_texts
        self._tokenizer = None
        if endpoint.tokenizer is not None:
            self._tokenizer = load_tokenizer(space)
        self._tokens_per_byte = _FIRST_TOKENS_PER_BYTE
        self._counted_until = 0.0
        self._refused_before = 0  # texts of the last portions, of which none was accepted
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        fields = endpoint.query_fields if space.task == "query" else endpoint.fields
        self._client = EndpointClient(
            endpoint,
            space.requested.model,
            fields,
            space.requested.dimension,
            follows_another=True,  # the probes, or a worker that was lost
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="surge-http", daemon=True).start()

    def prepare(self, texts: list[str]) -> CountedTexts:
        prompt = self._space.prompt
        with_prompt = [prompt + text for text in texts] if prompt else texts
        if self._tokenizer is None:
            return CountedTexts(with_prompt, None, np.zeros(len(texts), np.bool_))
        found = self._tokenizer.encode(texts)
        return CountedTexts(with_prompt, found.lengths, found.truncated)

    def forward(self, prepared: CountedTexts, rows: Rows, progress: Progress) -> Costs:
        return self.launch(prepared, rows, progress).finish()

    def launch(self, prepared: CountedTexts, rows: Rows, progress: Progress) -> LaunchedPortion:
        future = asyncio.run_coroutine_threadsafe(self._encode(prepared, rows), self._loop)
        return LaunchedPortion(
            is_done=future.done,
            finish=lambda: _result(future, progress),
            wait=lambda seconds: futures_wait([future], seconds),
        )

    async def _encode(self, prepared: CountedTexts, rows: Rows) -> Costs:
        begun = time.perf_counter()
        rows.truncated[rows.places] = prepared.truncated
        portion = _Portion(prepared.texts, self._counted(prepared), rows)
        try:
            async with asyncio.TaskGroup() as group:
                for start, stop in self._requests(portion.tokens):
                    group.create_task(self._send_in_turn(portion, start, stop))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if portion.accepted:
            self._refused_before = 0
        else:
            self._refused_before += len(rows.refused)
        seconds = self._seconds_since(begun)
        used = portion.used_tokens
        return Costs(tokens=used, padded_tokens=used, forward_seconds=seconds)

    def _seconds_since(self, begun: float) -> float:
        """Return the time of a portion that ends now, without that of portions that ended before:
        two are under way at a time."""
        ended = time.perf_counter()
        seconds = ended - max(begun, self._counted_until)
        self._counted_until = ended
        return seconds

    def _counted(self, prepared: CountedTexts) -> np.ndarray:
        """Return the tokens of each text, exact or as many per byte as in the last answer."""
        if prepared.tokens is not None:
            return prepared.tokens
        return self._estimated(prepared.texts)

    def _estimated(self, texts: list[str]) -> np.ndarray:
        sizes = np.array([len(text.encode()) for text in texts], np.int64)
        return np.ceil(sizes * self._tokens_per_byte).astype(np.int64) + 1

    @property
    def _probe_tokens(self) -> int:
        return int(self._estimated(self._probes).sum())

    def _requests(self, tokens: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the texts, from one to before another, of each request."""
        start = 0
        total = self._probe_tokens
        for place, count in enumerate(tokens.tolist()):
            is_full = place - start >= self._most_texts or total + count > self._most_tokens
            if is_full and place > start:
                yield start, place
                start = place
                total = self._probe_tokens
            total += count
        yield start, len(tokens)

    async def _send_in_turn(self, portion: _Portion, start: int, stop: int) -> None:
        async with self._slots:
            await self._send(portion, start, stop)

    async def _send(self, portion: _Portion, start: int, stop: int) -> None:
        """Encode texts, in several requests if need be."""
        refusal = await self._send_once(portion, start, stop, SUSPICIOUS_TRIES)
        if refusal is not None:
            await self._send_halves(portion, start, stop, refusal)

    async def _send_halves(
        self, portion: _Portion, start: int, stop: int, refusal: InputsRefused
    ) -> bool:
        """Encode texts that were refused together; return whether all of them are accepted.

        Of an odd number, one text goes by itself: with the probe, a half has half of the inputs.
        If the server failed over the first half, the second one shows whether it works.
        """
        if stop - start == 1:
            return False
        size = (stop - start) // 2
        are_accepted = True
        postponed: list[tuple[int, int, InputsRefused]] = []
        for first in range(start, stop, size):
            last = min(first + size, stop)
            tries = SUSPICIOUS_TRIES if last - first == 1 else 1
            refused = await self._send_once(portion, first, last, tries)
            if refused is not None and refused.is_suspicious:
                postponed.append((first, last, refused))
            elif refused is not None:
                are_accepted &= await self._send_halves(portion, first, last, refused)
        for half in postponed:
            are_accepted &= await self._send_halves(portion, *half)
        was_too_large = are_accepted and not refusal.is_suspicious
        if was_too_large and stop - start <= self._most_texts:
            self._most_texts = size
        return are_accepted

    async def _send_once(
        self, portion: _Portion, start: int, stop: int, most_tries: int
    ) -> InputsRefused | None:
        """Send a request and take its vectors; return why the server refuses it, if it does.

        Raises:
            EndpointDown: the answer does not match the request, so that no other can be trusted.
            ConfigError: it is that of another model.
        """
        if stop - start > self._most_texts:  # which was more when the portion was cut
            return InputsRefused("too many texts")
        tokens = int(portion.tokens[start:stop].sum()) + self._probe_tokens
        inputs = portion.texts[start:stop] + self._probes
        try:
            answer = await self._client.embed(inputs, tokens, self._space.dimension, most_tries)
            self._require_same_model(answer.vectors[stop - start :])
        except InputsRefused as refusal:
            if stop - start == 1:
                await self._refuse(portion, start, str(refusal))
            return refusal
        except UnusableAnswer as error:
            raise EndpointDown(
                f"the encoder at {self._url} gave an answer that cannot be used: {error}. The "
                "texts are not the cause. What is published stays; run again when the server works."
            ) from None
        if answer.tokens is not None:
            tokens = answer.tokens
            self._tokens_per_byte = tokens / max(1, sum(len(text.encode()) for text in inputs))
        self._take(portion, start, stop, answer.vectors[: stop - start], tokens)
        return None

    async def _refuse(self, portion: _Portion, place: int, reason: str) -> None:
        """Leave a text without a vector.

        Raises:
            EndpointDown: many were refused, and so is the probe by itself.
            ConfigError: see `_require_same_model`.
        """
        tokens = 0
        refused = self._refused_before + len(portion.rows.refused)
        if refused >= max(_MOST_REFUSED, portion.accepted):
            tokens = await self._tokens_of_probe(
                f"{refused + 1:,} texts; the last reason: {reason}"
            )
        portion.refuse(place, reason, tokens)

    async def _tokens_of_probe(self, without_vectors: str) -> int:
        """Send the probe by itself, and return its tokens."""
        if not self._probes:
            raise EndpointDown(f"the encoder at {self._url} gave no vectors for {without_vectors}")
        tokens = self._probe_tokens
        try:
            answer = await self._client.embed(self._probes, tokens, self._space.dimension)
            self._require_same_model(answer.vectors)
        except (InputsRefused, UnusableAnswer) as error:
            raise EndpointDown(
                f"the encoder at {self._url} gave no vectors for {without_vectors}. Their content "
                f"is not the cause, as it does not encode {self._probes[0]!r} either ({error})."
            ) from None
        return tokens if answer.tokens is None else answer.tokens

    def _require_same_model(self, probes: np.ndarray) -> None:
        """Compare the vector of an answer's probe with the one on record; if it is another one,
        nothing more is sent.

        Raises:
            UnusableAnswer: its vector is not finite.
            ConfigError: the answer is that of another model.
        """
        if not np.isfinite(probes).all():
            raise UnusableAnswer("the vector of a probe is not finite")
        try:
            self._space.require_probes(written_probes(probes))
        except ConfigError as error:
            raise self._client.end(
                ConfigError(
                    f"{error} The answer came from {self._url}, and none of its "
                    "vectors is kept; what is published is of the former model. If several servers "
                    "share this URL, give them one model; if a vector depends on the other texts "
                    "of its request, as after dynamic quantization, serve the model without it."
                )
            ) from None

    def _take(
        self, portion: _Portion, start: int, stop: int, vectors: np.ndarray, tokens: int
    ) -> None:
        if self._space.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            lengths[np.abs(lengths - 1) < _ROUNDING] = 1
            with np.errstate(invalid="ignore"):  # whoever publishes them names what is not finite
                vectors = vectors / np.maximum(lengths, 1e-12)
        portion.rows.matrix[portion.rows.places[start:stop]] = vectors

        portion.accepted += stop - start
        portion.used_tokens += tokens
        portion.rows.report(start, stop, tokens, "")


@dataclass(slots=True)
class _Portion:
    """A portion under way; only the event loop changes it.

    Attributes:
        tokens: of each text, int64.
        accepted: texts with a vector.
        used_tokens: of the answered requests.
    """

    texts: list[str]
    tokens: np.ndarray
    rows: Rows
    accepted: int = 0
    used_tokens: int = 0

    def refuse(self, place: int, reason: str, tokens: int) -> None:
        self.used_tokens += tokens
        self.rows.refused[place] = reason
        self.rows.report(place, place + 1, tokens, reason)


def _result(future: Future[Costs], progress: Progress) -> Costs:
    """Wait for a portion; each of its requests ends in time, or ends the run."""
    while not future.done():
        futures_wait([future], _PROGRESS_SECONDS)
        progress()
    return future.result()
