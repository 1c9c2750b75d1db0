"""One file for each data set, or its family."""
