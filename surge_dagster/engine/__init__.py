"""The engine: from source partitions to embedding files. Nothing in this package imports Dagster."""
