"""surge-dagster: embeddings for partitioned catalogs, as a Dagster project on the SURGE engine."""

__version__ = "0.1.0"
