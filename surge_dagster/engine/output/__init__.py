"""The state of an output: its vector spaces, the current one, the catalog on record, and which
files are fresh."""
