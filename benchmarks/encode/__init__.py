"""The encoder compared with other libraries, on the same texts."""
