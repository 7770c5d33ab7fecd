"""Encoders behind HTTP: servers with OpenAI's `/v1/embeddings`."""
