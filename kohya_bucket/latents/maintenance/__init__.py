"""Repair, prune and pack a store."""
