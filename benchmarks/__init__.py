"""Benchmarks of the encoder, of the output path, of resuming and of the Dagster side; see
docs/benchmarks.md."""

import os

# read when pyarrow is imported, as in commands
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
