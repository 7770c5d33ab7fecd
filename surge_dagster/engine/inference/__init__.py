"""The libraries that compute models: torch, OpenVINO, and packed passes for GPUs. Workers load them
by name."""
