"""Derived spaces: smaller vectors that are computed from those of another space."""
