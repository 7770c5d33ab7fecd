"""The asset graph: source_partitions → superbatches → embeddings, and what checks them."""
