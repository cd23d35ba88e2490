"""Records of what a run plays and trains on, from which pages are made later."""
