"""Names the files of a court: RUN_DIR/credit/NAME holds them beside its episodes."""

JUDGED_FILE = "judged.jsonl"
RESULT = "credit.json"
PAGE = "credit.html"
