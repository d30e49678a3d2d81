"""One runnable recipe per file."""
