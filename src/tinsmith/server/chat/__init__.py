"""Endpoints that speak text: the OpenAI-compatible messages, chat templates and detokenizing."""
