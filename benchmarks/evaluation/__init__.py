"""The evaluation against the paper (SURGE): its strategies on one pool, and its tables at this
machine's scale."""
