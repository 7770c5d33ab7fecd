"""Benchmarks of the encoder, of the output path, of resuming and of the Dagster side; see docs/benchmarks.md."""

import surge_dagster as surge_dagster  # before pyarrow, whose allocator it chooses
