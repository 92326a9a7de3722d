"""Models whose files hold weights in few bits, read by the layouts that others publish."""
