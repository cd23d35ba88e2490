"""Asynchrony behind the trainer's own calls: engines of their own, prefetch, group streaming."""
