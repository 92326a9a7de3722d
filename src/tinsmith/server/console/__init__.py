"""What people look at while a model trains: live events, the queue, and who is let in."""
