"""Studies: many runs over named axes, and their results."""
