"""The engines of a server: each in a slot that keeps it alive, and the choice between slots."""
