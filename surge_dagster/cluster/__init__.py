"""One run over many machines."""
