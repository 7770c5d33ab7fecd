"""What runs inside a worker: one module per way of computing vectors, all behind `base.Backend`."""
