"""Names the exit codes of a run; docs/failures.md explains them."""

# Beside 2, settings: something else that the user must mend.
MEND = 3
OUT_OF_MEMORY = 4
