"""Entry points: read a config, build the pieces, loop."""
