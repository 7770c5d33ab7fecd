"""Tables, frames and BigQuery as sources of partitions."""
