"""Between an engine's process and its caller: frames, messages, and the process itself."""
