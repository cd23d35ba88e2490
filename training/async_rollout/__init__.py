"""Asynchrony behind the trainer's own calls: dedicated engines, prefetch, group streaming, staleness."""
