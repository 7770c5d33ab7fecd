"""Which machines of a Ray cluster a run takes, without Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import cast

import pytest

from surge_dagster.cluster.machine import CatalogRuns, MachineFacts
from surge_dagster.cluster.ray_cluster import RayCluster
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.version import __version__

SPACE = EncodingSpec("hash://16").resolve()


def facts(precision: str) -> MachineFacts:
    return MachineFacts("host", __version__, SPACE.vectors_key, precision, "cpu", "", 1)


def test_precision_of_the_first_machine_is_that_of_the_run_also_when_all_machines_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = SimpleNamespace(RayError=OSError)
    ray = SimpleNamespace(init=lambda *_, **__: None, get=lambda value: value, exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    warnings, runs = list[str](), cast(CatalogRuns, None)
    cluster = RayCluster("auto", runs, SPACE, warnings.append)
    for address in ("gpu", "cpu", "gpu-again"):
        cluster._addresses[address] = address
    cluster._welcome("gpu", facts("bf16"))
    cluster._lose("gpu")
    cluster._welcome("cpu", facts("fp32"))
    assert "the machine cpu is not used: it has another precision (fp32) than this run (bf16)" in warnings[0]
    cluster._welcome("gpu-again", facts("bf16"))
    assert list(cluster._facts) == ["gpu-again"] and len(warnings) == 1
