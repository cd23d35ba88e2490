"""Small example environments, to be read and copied; each stands in one file and imports only `custom`."""
