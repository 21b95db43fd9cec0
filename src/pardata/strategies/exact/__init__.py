"""Strategy "exact": bitwise identical weights at every world size."""
