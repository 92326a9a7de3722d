"""What `sample` and `chat` share."""
