"""How far int8 vectors are from sentence-transformers' own in fp32: measured at a first start, said at every one.

int8 has no promised cosine, because no figure holds for every model; the vectors are in a space of their own instead,
and whoever starts a pool is told what they are worth. The cosine alone would say too little: vectors may all turn a
little without any search noticing, so the share of equal nearest neighbours stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields

from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings
from surge_dagster.engine.encoder.worker.backends.calibration_texts import judging_texts
from surge_dagster.engine.encoder.worker.fidelity import Fidelity, compare
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

_TEXTS = 300


def int8_fidelity(space: Space, backend: Backend, settings: BackendSettings) -> Fidelity:
    """The fidelity to sentence-transformers in fp32 on built-in texts, from disk where it is known."""
    name = parity.parity_name(space, backend, settings)
    kept = disk_cache.read_json(name) or {}
    figures = [
        float(figure)
        for figure in (kept.get(field.name) for field in fields(Fidelity))
        if isinstance(figure, int | float) and math.isfinite(figure)
    ]
    if len(figures) == len(fields(Fidelity)):
        return Fidelity(*figures)
    found = _measure(space, backend, settings)
    disk_cache.write_json(name, {**asdict(found), "space": space.name, "backend": backend.detail})
    return found


def fidelity_note(found: Fidelity) -> str:
    """One line for people."""
    same = "" if found.equal_neighbours is None else f", {found.equal_neighbours:.1%} of the ten nearest texts the same"
    return (
        f"int8 vectors are not those of fp32: lowest cosine {found.lowest_cosine:.4f}, mean {found.mean_cosine:.4f}"
        f"{same}, over {_TEXTS + len(parity.PARITY_TEXTS)} built-in texts"
    )


def _measure(space: Space, backend: Backend, settings: BackendSettings) -> Fidelity:
    from surge_dagster.engine.encoder.worker.sentence_model import load_reference, reference_vectors

    texts = [*judging_texts(_TEXTS), *parity.PARITY_TEXTS]
    reference = reference_vectors(load_reference(space, settings.device), space, texts)
    return compare(parity.backend_vectors(backend, space, texts), reference, texts)
