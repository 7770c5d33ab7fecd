"""Catalogs that this project can make by itself: real text that every machine has, and text of any amount.

Both build a folder that the engine reads like any other catalog, and build it again without touching what is the
same. Nothing is imported here, so that the processes that parse sources start fast.
"""
