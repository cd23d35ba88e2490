"""Names the files of a court: RUN_DIR/credit/NAME holds them beside its episodes."""

ASKED = "asked.json"
JUDGED_FILE = "judged.jsonl"
RESULT = "credit.json"
PAGE = "credit.html"
