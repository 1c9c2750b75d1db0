"""Two contestants that train by turns, and who gives them their turns."""
