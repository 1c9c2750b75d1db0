"""What a split looks like: figures, an overview, samples."""
