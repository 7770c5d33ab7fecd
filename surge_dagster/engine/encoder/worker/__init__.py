"""The worker's side of the encoder pool."""
