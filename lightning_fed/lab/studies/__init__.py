"""Studies: many runs over named axes, and what they came to."""
