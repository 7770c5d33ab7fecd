"""What an output file is: its metadata, its columns, and how it is written and read."""
