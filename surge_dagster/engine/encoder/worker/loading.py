"""The start of a worker: loads a model into a backend, checks its vectors, and finds the token
budget of its passes.

"auto" means the fastest installed backend that passes its checks: OpenVINO on a CPU, packed passes
on a GPU in half precision, otherwise torch. Why a backend was not used is a note of the worker.

Up to some number of tokens, the saturation point, a pass takes nearly the same time. It depends on
the model, the kernels and the device; smaller passes waste the device, much larger ones only need
memory and, on a CPU, caches. So a first start encodes the same texts, of one length, at three
budgets, and takes the smallest budget within 3 % of the best rate. The better of two rounds counts.
This takes some seconds; a model that is too slow for it keeps the backend's default.
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
from surge_dagster.engine.encoder.worker.backends import (
    Backend,
    BackendSettings,
    BudgetedBackend,
    encode_texts,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.folder import describe_model
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

REGISTERED_BACKENDS = {
    "hash": "surge_dagster.engine.encoder.worker.backends:HashBackend",
    "http": "surge_dagster.engine.inference.http_backend:HttpBackend",
    "packed": "surge_dagster.engine.inference.packed_backend:load_packed",
    "openvino": "surge_dagster.engine.inference.openvino_backend:OpenvinoBackend",
    "torch": "surge_dagster.engine.inference.torch_backend:load_torch",
}
_LONGEST_REASON = 1_000
_PROBE_TEXT = "a text"
# To find the token budget.
_CLOSE_ENOUGH = 0.97
_ROUNDS = 2
_MOST_SECONDS = 6.0
_BUDGET_TEXT = "cotton shirt, long sleeves, garden green, size 42"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend that is ready; see `PoolFacts`."""

    backend: Backend
    calibration: Calibration
    lowest_cosine: float | None = None
    notes: tuple[str, ...] = ()


def load_backend(space: Space, settings: BackendSettings, backend: str) -> Loaded:
    """Return the requested backend, or for "auto" the fastest one that passes its checks."""
    if ":" in backend or space.is_hash or space.is_http:
        own = "http" if space.is_http else "hash"
        loaded = make_backend(backend if ":" in backend else own, space, settings)
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
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[0][:_LONGEST_REASON]
            notes.append(f"{following} is used instead of {name}: {reason}")
    return _attempt(space, names[-1], settings, notes)


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
    """Import a backend, load the model into it, and encode one text before anything else.

    Libraries set themselves up during their first pass, which is not always safe in two threads, so
    that pass runs alone. And a worker that is lost later was able to encode: the texts it was given
    are the likely cause.
    """
    module, _, attribute = REGISTERED_BACKENDS.get(name, name).partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)(space, settings)
    encode_texts(backend, [_PROBE_TEXT], space)
    return backend


def _attempt(space: Space, name: str, settings: BackendSettings, notes: list[str]) -> Loaded:
    backend = make_backend(name, space, settings)
    calibration = _calibration(space, backend, settings)
    lowest = parity.check_parity(space, backend, settings, calibration)
    set_token_budget(space, backend, settings, calibration)
    return Loaded(backend, calibration, lowest, tuple(notes))


def _calibration(space: Space, backend: Backend, settings: BackendSettings) -> Calibration:
    """Return what is known of a space's backend on this kind of device, with as many threads."""
    device = settings.device.partition(":")[0]
    if device == "cpu":
        device = processor()
    machine = f"{getattr(backend, 'machine', device)} {settings.threads}"
    key = cache_key(space.vectors_key, backend.name, backend.detail, settings.precision, machine)
    return Calibration(f"calibration/{key}.json")


def set_token_budget(
    space: Space, backend: Backend, settings: BackendSettings, calibration: Calibration
) -> None:
    """Give the backend the best budget for this machine, unless one was requested."""
    if settings.token_budget is not None or not isinstance(backend, BudgetedBackend):
        return
    # Workers that start together measure once, and not concurrently.
    with disk_cache.lock("calibration/.measuring"):
        budget = calibration.read("token_budget")
        if budget is None:
            budget = measured_budget(backend, space)
            calibration.write(token_budget=budget)
    backend.token_budget = budget


def measured_budget(backend: BudgetedBackend, space: Space) -> int:
    """Return the smallest budget with nearly the best rate; the default if measuring takes long."""
    default = backend.token_budget
    budgets = backend.budget_candidates
    length = int(backend.prepare([_BUDGET_TEXT]).lengths[0])
    # Packed passes lie below their budget by a text; these few texts less keep all passes full.
    texts = backend.streams * (budgets[-1] // length) - budgets[-1] // budgets[0]

    first_rate = _tokens_per_second(backend, space, backend.streams * (budgets[0] // length))
    if _ROUNDS * len(budgets) * texts * length / first_rate > _MOST_SECONDS:
        return default

    rates = dict.fromkeys(budgets, 0.0)
    for _ in range(_ROUNDS):
        for budget in budgets:
            backend.token_budget = budget
            rate = _tokens_per_second(backend, space, texts)
            if backend.token_budget < budget:  # memory ran out
                return backend.token_budget
            rates[budget] = max(rates[budget], rate)
    enough = _CLOSE_ENOUGH * max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= enough)


def _tokens_per_second(backend: BudgetedBackend, space: Space, texts: int) -> float:
    _, costs = encode_texts(backend, [_BUDGET_TEXT] * texts, space)
    return costs.padded_tokens / max(costs.forward_seconds, 1e-6)


def _check_files(space: Space) -> None:
    facts = describe_model(Path(space.model_path), space.requested.trust_remote_code)
    if facts.digest != space.model_digest:
        raise ConfigError(
            f"the model in {space.model_path} changed while the pool was starting (its digest is "
            f"{facts.digest[:12]} now, it was {space.model_digest[:12]}); start again"
        )
