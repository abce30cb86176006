"""The embedded default model and the demonstration that runs on it."""
