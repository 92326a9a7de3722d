"""Between the engine's owner and its process: frames, messages, and the process itself."""
