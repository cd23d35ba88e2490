"""Weight sync: the policy's weights on their way to a rollout engine, and the checks around it."""
