"""The batch protocol, datasets and prompts, conversations as token ids, seeds, and the loading of users' files."""
