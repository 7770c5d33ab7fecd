"""A worker's start: from a space and settings to a backend that is known to be right.

"auto" means the fastest backend that is installed and passes its checks: on a CPU OpenVINO, else torch. Whatever makes
a candidate step aside is said in one line, which travels to the pool with the worker's first message.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings
from surge_dagster.engine.encoder.worker.token_budget import settle_token_budget
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.model_files import describe_model
from surge_dagster.engine.model.spec import Space

_NOT_COMPARED = "vectors were not compared with sentence-transformers' own (check_parity is off)"
_LONGEST_REASON = 1_000


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend that is ready.

    Attributes:
        backend: computes vectors.
        lowest_cosine: against sentence-transformers, None where it was not asked for or there is no model.
        notes: one line for each thing a person should know.
    """

    backend: Backend
    lowest_cosine: float | None
    notes: list[str]


def load_backend(space: Space, settings: BackendSettings, backend: str, check_parity: bool) -> Loaded:
    """Loads the model into the backend asked for, or into the best one for "auto"."""
    if ":" in backend:
        module, _, attribute = backend.partition(":")
        return Loaded(getattr(importlib.import_module(module), attribute)(space, settings), None, [])
    if space.is_hash:
        from surge_dagster.engine.encoder.worker.backends.hash_backend import HashBackend

        return Loaded(HashBackend(prompt=space.prompt, max_length=space.max_length), None, [])
    _check_files(space)
    notes: list[str] = []
    candidates = _candidates(settings) if backend == "auto" else [backend]
    for candidate in candidates:
        try:
            made = _MAKERS[candidate](space, settings)
            lowest = None
            if check_parity:
                lowest = _parity(space, made, settings)
            else:
                notes.append(_NOT_COMPARED)
            settle_token_budget(space, made, settings)
            return Loaded(made, lowest, notes)
        except Exception as error:
            if candidate == candidates[-1]:
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            next_one = candidates[candidates.index(candidate) + 1]
            notes.append(f"{candidate} stepped aside for {next_one}: {reason[0][:_LONGEST_REASON]}")
    raise AssertionError("there is always a last candidate")


def _candidates(settings: BackendSettings) -> list[str]:
    installed = importlib.util.find_spec("openvino") is not None
    return ["openvino", "torch"] if settings.device == "cpu" and installed else ["torch"]


def _torch(space: Space, settings: BackendSettings) -> Backend:
    from surge_dagster.engine.encoder.worker.backends.torch_backend import load_torch

    return load_torch(space, settings)


def _openvino(space: Space, settings: BackendSettings) -> Backend:
    from surge_dagster.engine.encoder.worker.backends.openvino_backend import OpenvinoBackend

    return OpenvinoBackend(space, settings)


_MAKERS: dict[str, Callable[[Space, BackendSettings], Backend]] = {"torch": _torch, "openvino": _openvino}


def _check_files(space: Space) -> None:
    """The files may have changed since the pool digested them: vectors of another model must not get this name."""
    found = describe_model(Path(space.model_path)).digest
    if found != space.model_digest:
        raise ConfigError(
            f"the model in {space.model_path} changed while the pool was starting (its digest is {found[:12]} now, "
            f"it was {space.model_digest[:12]}); start again"
        )


def _parity(space: Space, backend: Backend, settings: BackendSettings) -> float:
    name = parity.parity_name(space, backend, settings)
    lowest = parity.kept_parity(name)
    if lowest is None:
        from surge_dagster.engine.encoder.worker.sentence_model import load_reference, reference_vectors

        reference = reference_vectors(load_reference(space, settings.device), space, parity.PARITY_TEXTS)
        lowest = parity.lowest_cosine(parity.backend_vectors(backend, space, parity.PARITY_TEXTS), reference)
        parity.keep_parity(name, lowest, space, backend)
    floor = parity.FLOORS[settings.precision]
    if lowest < floor:
        raise ConfigError(
            f"{backend.detail} in {settings.precision} differs from sentence-transformers (lowest cosine {lowest:.7f}, "
            f"promised {floor:.5f}); use another backend or precision, or check_parity=False if you accept it"
        )
    return lowest
