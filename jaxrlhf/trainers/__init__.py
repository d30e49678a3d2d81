"""Pure training steps, and the few lines that compose losses with forward passes."""
