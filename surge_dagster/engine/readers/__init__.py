"""What readers do with published vectors: loading, tables of rows, search."""
