"""The encoder service: answers queries over HTTP, in the vector spaces of an output, within a
promised time."""
