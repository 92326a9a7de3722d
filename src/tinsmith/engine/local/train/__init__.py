"""Training: passes over packed datums, losses, and the optimizer step."""
