"""No test of the service may leave processes or memory behind."""

from __future__ import annotations

from tests.engine.encoder.faulty_pools import no_leaks

__all__ = ["no_leaks"]
