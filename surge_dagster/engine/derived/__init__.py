"""Derived spaces, and the recall that they keep."""
