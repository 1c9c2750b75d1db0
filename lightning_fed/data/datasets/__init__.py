"""One file for each data set or family of data sets."""
