"""OpenAI batch files over a pool: read, run, written down as they finish, and continued where they were left."""
