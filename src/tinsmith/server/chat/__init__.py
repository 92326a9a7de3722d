"""Endpoints that speak text: messages as OpenAI and Anthropic have them, and chat templates."""
