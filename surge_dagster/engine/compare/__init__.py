"""Two spaces of one output, compared by what a search finds in them."""
