"""The start of a worker: loads a model into a backend, and checks its vectors.

"auto" means the fastest installed backend that passes its checks: OpenVINO on a CPU, packed passes
on a GPU in half precision, otherwise torch. Why a backend was not used is a note of the worker.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from surge_dagster.engine.encoder.calibration import Calibration, cache_key
from surge_dagster.engine.encoder.devices import library_versions, processor
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings, encode_texts
from surge_dagster.engine.encoder.worker.token_budget import set_token_budget
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.folder import describe_model
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
    calibration: Calibration
    lowest_cosine: float | None = None
    notes: tuple[str, ...] = ()


def load_backend(space: Space, settings: BackendSettings, backend: str) -> Loaded:
    """Return the requested backend, or for "auto" the fastest one that passes its checks."""
    if space.is_hash or ":" in backend:
        loaded = make_backend(backend if ":" in backend else "hash", space, settings)
        _probe(loaded, space)
        return Loaded(loaded, _calibration(space, loaded, settings))

    _check_files(space)
    names = [backend]
    if backend == "auto":
        names = [*_faster_backends(settings), "torch"]
    notes = list[str]()
    for name, following in pairwise(names):
        try:
            return _attempt(space, name, settings, notes)
        except Exception as error:
            notes.append(_note(following, name, error))
    return _attempt(space, names[-1], settings, notes)


def _note(used: str, refused: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{used} is used instead of {refused}: {lines[0][:_LONGEST_REASON]}"


def loaded_tokenizer(backend: Backend) -> str:
    """Return the tokenizer as the libraries loaded it, for `Space.tokenizer`."""
    digest = getattr(backend, "tokens_digest", "")
    if not digest:
        return ""
    versions = library_versions()
    return f"{digest} transformers-{versions['transformers']} tokenizers-{versions['tokenizers']}"


def _faster_backends(settings: BackendSettings) -> list[str]:
    """Return the backends to try before torch."""
    if settings.device == "cpu":
        has_openvino = importlib.util.find_spec("openvino") is not None
        return ["openvino"] if has_openvino else []
    return [] if settings.precision == "fp32" else ["packed"]


def make_backend(name: str, space: Space, settings: BackendSettings) -> Backend:
    """Import a backend and load the model into it."""
    module, _, attribute = REGISTERED_BACKENDS.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)(space, settings)


def _attempt(space: Space, name: str, settings: BackendSettings, notes: list[str]) -> Loaded:
    backend = make_backend(name, space, settings)
    _probe(backend, space)
    calibration = _calibration(space, backend, settings)
    lowest = parity.check_parity(space, backend, settings, calibration)
    set_token_budget(space, backend, settings, calibration)
    return Loaded(backend, calibration, lowest, tuple(notes))


def _probe(backend: Backend, space: Space) -> None:
    """Encodes one text before anything else.

    Libraries set themselves up during their first pass, which is not always safe in two threads, so
    that pass runs alone. And a worker that is lost later was able to encode: the texts it was given
    are the likely cause.
    """
    encode_texts(backend, [_PROBE_TEXT], space.dimension, space.dtype)


def _calibration(space: Space, backend: Backend, settings: BackendSettings) -> Calibration:
    """Return what is known of a space's backend on this kind of device, with as many threads."""
    device = settings.device.partition(":")[0]
    if device == "cpu":
        device = processor()
    machine = f"{getattr(backend, 'machine', device)} {settings.threads}"
    key = cache_key(space.vectors_key, backend.name, backend.detail, settings.precision, machine)
    return Calibration(f"calibration/{key}.json")


def _check_files(space: Space) -> None:
    facts = describe_model(Path(space.model_path), space.requested.trust_remote_code)
    if facts.digest != space.model_digest:
        raise ConfigError(
            f"the model in {space.model_path} changed while the pool was starting (its digest is "
            f"{facts.digest[:12]} now, it was {space.model_digest[:12]}); start again"
        )
