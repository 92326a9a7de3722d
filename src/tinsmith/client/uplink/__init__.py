"""What the clients of one credential at one service share."""
