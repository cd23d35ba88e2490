"""Small example environments, to be read and copied.

Each stands in one file and imports only `custom`.
"""
