"""Sensors and schedules of a catalog, which launch runs without an operator."""
