"""Settings: what can be set, where it is read from, how an error names the place."""
