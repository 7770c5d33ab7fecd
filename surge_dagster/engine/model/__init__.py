"""What a model is: where its files are, what they contain, and the vector space that follows from that."""
