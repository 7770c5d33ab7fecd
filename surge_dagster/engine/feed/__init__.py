"""The change feed of a space: what became of its rows, since when."""
