"""Catalogs that the project builds itself, as folders of Parquet files: demo (real text) and
synthetic (any size)."""
