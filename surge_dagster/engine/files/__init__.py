"""What an output file is: its metadata, its columns, and the formats that it can have."""
