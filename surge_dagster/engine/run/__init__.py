"""The loop of a run: reading, SuperBatches, reuse of old vectors, encoding, publishing, staging,
report."""
