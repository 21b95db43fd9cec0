"""`python -m pardata`: what is here, and does it work?"""
