"""Models: locating their files, their digest, and the vector space that follows from them."""
