"""Base models: their files, the decoder that runs them, and adapters on its products."""
