"""Makes the page of a run, or of several: one HTML file that needs nothing else.

run_folder.py     reads a run's folder: metrics, events, settings
metric_store.py   holds metrics over steps
curves.py         thins curves out, and writes them into the page
charts.py         says which metrics a run's charts show
alarm_rows.py     makes rows and a time line of alarms
settings.py       compares settings with the defaults, and of runs with each other
groups.py         groups runs that differ in their seeds
content.py        puts together what a page holds
html.py           writes the file; its style and its code lie in assets/ and shared/
writer.py         rewrites a run's page while it goes on
"""
