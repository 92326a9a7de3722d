"""The steps that bring a database's tables up to date, and what takes them."""
