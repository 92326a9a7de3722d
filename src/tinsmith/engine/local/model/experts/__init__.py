"""Layers of experts: who goes to whom, the products of all experts, and adapters on them."""
