"""Chunks of long documents as the rows of a source: `source` makes them, `splitting` says where a
document is cut, and `boundaries` keeps most of these places when a document is edited."""
