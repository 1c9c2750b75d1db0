"""What a run writes to disk."""
