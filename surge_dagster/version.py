"""The version of this package, which writers name in their files."""

__version__ = "0.1.0"
