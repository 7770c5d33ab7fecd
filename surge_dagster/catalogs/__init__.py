"""The demo catalog: folders of Parquet files made of text that is on this machine."""
