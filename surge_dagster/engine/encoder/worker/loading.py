"""The start of a worker: loads the model into a backend, checks its vectors and sets its token
budget.

"auto" means the fastest installed backend that passes its checks: OpenVINO on a CPU, packed passes
on a GPU in half precision, otherwise torch. Why a backend was not used is a note of the worker. In
the same way the settings' fallback precision takes the place of one whose vectors are below the
promise: activations of some models overflow fp16.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from surge_dagster.engine.encoder.calibration import Calibration, calibration_name
from surge_dagster.engine.encoder.devices import library_versions, processor
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings, encode_texts
from surge_dagster.engine.encoder.worker.token_budget import set_token_budget
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.folder import ModelFacts, describe_model
from surge_dagster.engine.model.spec import Space

REGISTERED_BACKENDS = {
    "hash": "surge_dagster.engine.encoder.worker.backends.hash_backend:HashBackend",
    "packed": "surge_dagster.engine.inference.packed_backend:load_packed",
    "openvino": "surge_dagster.engine.inference.openvino_backend:OpenvinoBackend",
    "torch": "surge_dagster.engine.inference.torch_backend:load_torch",
}
_LONGEST_REASON = 1_000
_PROBE_TEXT = "a text"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend that is ready; see `PoolFacts`."""

    backend: Backend
    precision: str
    calibration: Calibration
    lowest_cosine: float | None = None
    notes: tuple[str, ...] = ()


def load_backend(space: Space, settings: BackendSettings, backend: str) -> Loaded:
    """The fastest one that passes its checks for "auto"."""
    if space.is_hash or ":" in backend:
        loaded = make_backend(backend if ":" in backend else "hash", space, settings)
        _probe(loaded, space)
        return Loaded(loaded, settings.precision, _calibration(space, loaded, settings))
    notes = _unused_prompts(_check_files(space), space)
    of_model, names = len(notes), [backend]
    if backend == "auto":
        names = [*_faster_backends(settings), "torch"]
    attempts = [(name, settings) for name in names]
    if settings.fallback_precision is not None:
        attempts += [
            (name, replace(settings, precision=settings.fallback_precision)) for name in names
        ]
    for (name, chosen), following in zip(attempts, [*attempts[1:], None], strict=True):
        try:
            return _attempt(space, name, chosen, tuple(notes))
        except Exception as error:
            other_precision = following is not None and following[1].precision != chosen.precision
            if following is None or (
                other_precision and not isinstance(error, parity.BelowPromise)
            ):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][
                :_LONGEST_REASON
            ]
        if other_precision:
            del notes[of_model:]  # which backends were tried in a precision that is not used
        was, instead = (
            (chosen.precision, following[1].precision) if other_precision else (name, following[0])
        )
        notes.append(f"{instead} is used instead of {was}: {reason}")
    raise AssertionError("there is always a last attempt")


def loaded_tokenizer(space: Space, backend: Backend) -> str:
    """The tokenizer as the libraries loaded it, for `Space.tokenizer`."""
    digest = getattr(backend, "tokens_digest", "")
    # queries may have a tokenizer of their own
    if not digest or (space.routed and space.task == "query"):
        return ""
    return "{0} transformers-{transformers} tokenizers-{tokenizers}".format(
        digest, **library_versions()
    )


def _faster_backends(settings: BackendSettings) -> list[str]:
    """Those to try before torch."""
    if settings.device != "cpu":
        return [] if settings.precision == "fp32" else ["packed"]
    return ["openvino"] if importlib.util.find_spec("openvino") is not None else []


def make_backend(name: str, space: Space, settings: BackendSettings) -> Backend:
    """Each backend is imported only where it is used."""
    module, _, attribute = REGISTERED_BACKENDS.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)(space, settings)


def _attempt(space: Space, name: str, settings: BackendSettings, notes: tuple[str, ...]) -> Loaded:
    backend = make_backend(name, space, settings)
    _probe(backend, space)
    calibration = _calibration(space, backend, settings)
    lowest = parity.check_parity(space, backend, settings, calibration)
    set_token_budget(space, backend, settings, calibration)
    return Loaded(backend, settings.precision, calibration, lowest, notes)


def _probe(backend: Backend, space: Space) -> None:
    """Encodes one text before anything else.

    Libraries set themselves up during their first pass, which is not always safe in two threads, so
    that pass runs alone. And a worker that is lost later was able to encode: the texts it was given
    are the likely cause.
    """
    encode_texts(backend, [_PROBE_TEXT], space.dimension, space.dtype)


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
