"""Scorers: texts in, one float per row out; runs on the host."""
