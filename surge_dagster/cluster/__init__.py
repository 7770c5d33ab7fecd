"""One run over many machines. The core knows nothing of it."""
