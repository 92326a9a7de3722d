"""Images: what a folder says of them, their pixels, and what the vision tower makes of them."""
