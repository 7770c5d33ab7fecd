"""The engine: from source partitions to embedding files. Nothing in it imports Dagster."""
