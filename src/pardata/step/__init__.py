"""One step: what is run, counted and sent."""
