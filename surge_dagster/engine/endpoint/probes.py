"""Probes: five texts whose vectors identify the model behind an endpoint.

The weights of a server cannot be hashed. So a space records the vectors of these texts, and each
start encodes them again. The first of them is also an input of each request of a run: so each
answer shows by itself which model gave it, whenever the server changes and however many servers
share a URL. Servers and devices differ in the last bits; another model, another version or another
pooling gives a cosine far below the limit.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import numpy as np

from surge_dagster.engine.endpoint.answers import Answer, UnusableAnswer
from surge_dagster.engine.endpoint.client import EndpointClient, InputsRefused
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.cosines import cosines
from surge_dagster.engine.support.waiting import in_background, result_of

# Their vectors are on record in each space.json: do not change them.
PROBE_TEXTS = (
    "Stainless steel bottle, 750 ml (black): keeps drinks cold for 24 hours",
    "How do I return a pair of shoes that I bought last week?",
    "Größe 43, naïve façade, Ærøskøbing; 東京の夜景, пример текста, مثال",
    "def first(rows: list[int]) -> int:\n    return rows[0]",
    "The committee met on Tuesday, and decided nothing. " * 8,
)
LOWEST_PROBE_COSINE = 0.999


def written_probes(vectors: np.ndarray) -> tuple[str, ...]:
    """Return vectors as space.json records them: float16, little endian, in base64."""
    scaled = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return tuple(base64.b64encode(row).decode() for row in scaled.astype("<f2"))


def lowest_probe_cosine(recorded: Sequence[str], found: Sequence[str]) -> float:
    """Return the lowest cosine between probes of equal texts; 0 if they cannot be compared."""
    try:
        before = _read_probes(recorded)
    except ValueError:
        return 0.0  # changed by hand
    now = _read_probes(found)
    if before.shape != now.shape:
        return 0.0
    return float(cosines(before, now).min())


def _read_probes(written: Sequence[str]) -> np.ndarray:
    rows = [np.frombuffer(base64.b64decode(text), "<f2") for text in written]
    return np.stack(rows).astype(np.float32)


def probe_endpoint(
    endpoint: Endpoint, model: str, dimensions: int | None, prompt: str
) -> np.ndarray:
    """Return the vectors of the probes, float32 [5, dimension].

    Raises:
        ConfigError: the endpoint refuses them, or its vectors cannot be used.
        EndpointDown: it encodes nothing.
    """
    texts = [prompt + text for text in PROBE_TEXTS]

    async def ask() -> Answer:
        async with EndpointClient(endpoint, model, endpoint.fields, dimensions) as client:
            return await client.embed(texts, len("".join(texts)) // 3, dimensions)

    where = f"the encoder at {endpoint.url}"
    try:
        # In a thread of its own, because a notebook runs an event loop in this one.
        answer = result_of(in_background(lambda: asyncio.run(ask()), "surge-probes"))
    except InputsRefused as error:
        raise ConfigError(
            f"{where} refuses five short texts ({error}). Check model, dimension and "
            "encoder_fields."
        ) from None
    except UnusableAnswer as error:
        raise ConfigError(
            f"{where} gives no usable vectors for {model!r}: {error}. If it does not know the "
            "field `dimensions`, unset dimension."
        ) from None
    if not np.isfinite(answer.vectors).all():
        raise ConfigError(f"{where} gives vectors for {model!r} that are not finite.")
    return answer.vectors
