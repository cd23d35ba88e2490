"""Programs as agents: what speaks to an OpenAI or Anthropic server is served by the turn loop."""
