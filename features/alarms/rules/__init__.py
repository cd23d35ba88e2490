"""Holds the rules, in files by what they look at; `catalogue` finds every file of this folder."""
