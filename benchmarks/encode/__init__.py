"""The encoder beside other libraries, on the same texts."""
