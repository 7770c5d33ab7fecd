"""What a GPU makes of this engine: `python -m benchmarks.gpu`."""
