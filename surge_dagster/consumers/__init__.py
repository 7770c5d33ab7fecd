"""Consumers of the change feed: tables of vector databases that have the rows of the files."""
