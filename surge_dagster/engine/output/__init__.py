"""From vectors to published files: publishing, split partitions, freshness and vector spaces."""
