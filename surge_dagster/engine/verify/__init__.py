"""Verification of a space against its source, and switching readers to it."""
