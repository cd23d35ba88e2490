"""The zoo: today's model families, tiny and random, and what is proved of each."""
