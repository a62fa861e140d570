"""A run as its events.jsonl tells it: written while it runs, and lived again afterwards."""
