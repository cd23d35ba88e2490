"""The user's part: environments, agents, tools and rewards, made to be edited."""
