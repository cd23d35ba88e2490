"""Generation: the interface of a rollout engine, the episodes it plays, their batches, and the sending of weights."""
