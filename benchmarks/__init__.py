"""Speed and memory, side by side with a loop written by hand; each module says how it is run."""
