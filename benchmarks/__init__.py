"""Benchmarks: each prints a table and, as its last line, one JSON document; figures are ratios within one run."""
