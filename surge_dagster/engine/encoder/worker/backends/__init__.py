"""Backends: the libraries that compute vectors, and the converted models of OpenVINO."""
