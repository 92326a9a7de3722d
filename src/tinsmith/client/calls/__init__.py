"""One call of a training client, from its arguments to its requests."""
