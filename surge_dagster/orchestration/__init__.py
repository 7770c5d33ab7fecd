"""How a run and a sensor tick work: what they read from Dagster, what they decide, and what they
report."""
