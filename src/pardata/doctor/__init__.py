"""`python -m pardata`: checks of the launcher, devices, limits and communication."""
