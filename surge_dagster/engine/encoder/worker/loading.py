"""The start of a worker: loads the model into a backend, checks its vectors and sets its token budget.

"auto" means the fastest installed backend that passes its checks: OpenVINO on a CPU, otherwise torch. The reason why a
backend was not used travels to the pool, in one line, with the worker's first message. In the same way the settings'
fallback precision takes the place of one whose vectors are below the promise: activations of some models overflow fp16.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from surge_dagster.engine.encoder.calibration import Calibration, calibration_name
from surge_dagster.engine.encoder.devices import processor
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings, encode_texts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.folder import ModelFacts, describe_model
from surge_dagster.engine.model.spec import Space

_NOT_COMPARED = "vectors were not compared with sentence-transformers' own (check_parity is off)"
_LONGEST_REASON = 1_000
_PROBE_TEXT = "a text"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend that is ready.

    Attributes:
        backend: computes vectors.
        precision: in which it computes.
        calibration: its cached measurements.
        lowest_cosine: against sentence-transformers; None where it was not requested or there is no model.
        notes: one line for each thing that an operator should know.
    """

    backend: Backend
    precision: str
    calibration: Calibration
    lowest_cosine: float | None = None
    notes: tuple[str, ...] = ()


def load_backend(space: Space, settings: BackendSettings, backend: str, check_parity: bool) -> Loaded:
    """Loads the model into the requested backend, or into the fastest one for "auto".

    Raises:
        ConfigError: the model's files changed, or its vectors are below the promised cosine.
    """
    if ":" in backend:
        module, _, attribute = backend.partition(":")
        made = getattr(importlib.import_module(module), attribute)(space, settings)
        _probe(made, space)
        return Loaded(made, settings.precision, _calibration(space, made, settings))
    if space.is_hash:
        from surge_dagster.engine.encoder.worker.backends.hash_backend import HashBackend

        made = HashBackend(prompt=space.prompt, max_length=space.max_length)
        _probe(made, space)
        return Loaded(made, settings.precision, _calibration(space, made, settings))
    notes = _unused_prompts(_check_files(space), space)
    names = _candidates(settings) if backend == "auto" else [backend]
    attempts = [(name, settings) for name in names]
    if settings.fallback_precision is not None:
        attempts.append((names[-1], replace(settings, precision=settings.fallback_precision)))
    for (name, chosen), following in zip(attempts, [*attempts[1:], None], strict=True):
        try:
            return _attempt(space, name, chosen, check_parity, tuple(notes))
        except Exception as error:
            if following is None or (following[0] == name and not isinstance(error, parity.BelowPromise)):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]
        was, instead = (chosen.precision, following[1].precision) if following[0] == name else (name, following[0])
        notes.append(f"{instead} is used instead of {was}: {reason}")
    raise AssertionError("there is always a last attempt")


def _attempt(space: Space, name: str, settings: BackendSettings, check_parity: bool, notes: tuple[str, ...]) -> Loaded:
    # Imported here: a worker of another backend starts a fifth sooner without the tokenizers.
    from surge_dagster.engine.encoder.worker.token_budget import set_token_budget

    made = _LOADERS[name](space, settings)
    _probe(made, space)
    calibration = _calibration(space, made, settings)
    lowest = parity.check_parity(space, made, settings, calibration) if check_parity else None
    set_token_budget(space, made, settings, calibration)
    return Loaded(made, settings.precision, calibration, lowest, notes if check_parity else (*notes, _NOT_COMPARED))


def _probe(backend: Backend, space: Space) -> None:
    """Encodes one text before anything else.

    Libraries set themselves up during their first pass, which is not always safe in two threads, so that pass runs
    alone. And a worker that is lost later was able to encode: the texts it was given are the likely cause.
    """
    encode_texts(backend, [_PROBE_TEXT], space.dimension, space.dtype)


def _candidates(settings: BackendSettings) -> list[str]:
    installed = importlib.util.find_spec("openvino") is not None
    return ["openvino", "torch"] if settings.device == "cpu" and installed else ["torch"]


def _torch(space: Space, settings: BackendSettings) -> Backend:
    from surge_dagster.engine.encoder.worker.backends.torch_backend import load_torch

    return load_torch(space, settings)


def _openvino(space: Space, settings: BackendSettings) -> Backend:
    from surge_dagster.engine.encoder.worker.backends.openvino_backend import OpenvinoBackend

    return OpenvinoBackend(space, settings)


_LOADERS: dict[str, Callable[[Space, BackendSettings], Backend]] = {"torch": _torch, "openvino": _openvino}


def _calibration(space: Space, backend: Backend, settings: BackendSettings) -> Calibration:
    default = processor() if settings.device == "cpu" else settings.device.partition(":")[0]
    name = calibration_name(
        space,
        backend=backend.name,
        detail=backend.detail,
        precision=settings.precision,
        machine=f"{getattr(backend, 'machine', default)} {settings.threads}",
    )
    return Calibration(name)


def _check_files(space: Space) -> ModelFacts:
    """Vectors of a model that changed after the pool computed its digest must not get the name of the space."""
    facts = describe_model(Path(space.model_path), space.requested.trust_remote_code)
    if facts.digest != space.model_digest:
        raise ConfigError(
            f"the model in {space.model_path} changed while the pool was starting (its digest is {facts.digest[:12]} "
            f"now, it was {space.model_digest[:12]}); start again"
        )
    return facts


def _unused_prompts(facts: ModelFacts, space: Space) -> list[str]:
    if space.requested.document_prompt is not None or not facts.prompts.unused:
        return []
    return [
        f"the model has a prompt named {' and one named '.join(facts.prompts.unused)}, which sentence-transformers' "
        "encode_document does not use: its prompt for documents is empty; if documents need one, set document_prompt "
        "to its text, else to ''"
    ]
