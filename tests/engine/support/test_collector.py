"""Python's collector is off only inside the block."""

from __future__ import annotations

import gc

import pytest

from surge_dagster.engine.support.collector import without_collector


def test_collector_is_off_inside_the_block() -> None:
    with without_collector():
        assert not gc.isenabled()


def test_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(RuntimeError), without_collector():
        raise RuntimeError

    assert gc.isenabled()
