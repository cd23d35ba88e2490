"""What flows: the batch protocol, datasets, prompts, seeds and the loading of users' files."""
