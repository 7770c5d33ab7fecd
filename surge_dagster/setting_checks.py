"""Settings that no run can work with, told when they are read: no model is looked for, no device, no network.

What only this machine lacks is no part of it: definitions are loaded where no run goes.
"""

from __future__ import annotations

from surge_dagster.engine.encoder.devices import PRECISIONS, device_kind, device_names
from surge_dagster.engine.encoder.pool import BACKENDS
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import HASH_SCHEME, EncodingSpec
from surge_dagster.engine.support.urls import is_bare, is_object_store, local_path
from surge_dagster.engine.thresholds import Thresholds


def require_place(value: str, *, what: str) -> str:
    """Refuse what is no place for an "output" or a "catalog".

    Raises:
        ValueError: the place is none, or holds a secret, which is not shown.
    """
    if not is_bare(value):
        raise ValueError(
            "expected a path, or a URL of a bucket and a path alone; credentials belong into the environment or "
            "into storage_options"
        )
    if what == "catalog" or not is_object_store(value):
        try:
            local_path(value, what=what)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return value


def require_devices(value: str) -> str:
    """Refuse devices that there are on no machine, or that do not go together; else `ValueError`."""
    kinds = set(map(device_kind, device_names(value)))
    if len(kinds) != 1 or None in kinds:
        raise ValueError('expected auto, or a list of one kind: cpu, cuda, or cuda:N as in "cuda:0,cuda:1"')
    return value


def require_precision(value: str) -> str:
    """Refuse a precision of no name that is known, with `ValueError`."""
    if value not in ("auto", *PRECISIONS):
        raise ValueError(f"expected auto or one of {', '.join(PRECISIONS)}")
    return value


def require_backend(value: str) -> str:
    """Refuse a backend of no name that is known, with `ValueError`."""
    if value not in BACKENDS and ":" not in value:
        raise ValueError(f"expected one of {', '.join(BACKENDS)}, or module:Class")
    return value


def require_encoding(spec: EncodingSpec, thresholds: Thresholds) -> None:
    """Refuse thresholds that contradict each other, and a `hash://` that makes no such vectors.

    Raises:
        ConfigError: either of these.
    """
    if spec.model.startswith(HASH_SCHEME):
        spec.resolve()
    thresholds.resolve(texts_per_second=1.0)  # the speed matters only to what is not given
