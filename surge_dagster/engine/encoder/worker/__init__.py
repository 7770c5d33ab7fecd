"""The side of the encoder pool that runs in worker processes: texts in shared memory become vectors."""
