"""The worker process: one engine, one I/O thread."""
