"""Small example environments, to be read and copied."""
