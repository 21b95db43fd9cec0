"""Strategy "exact": the same bits at every world size."""
