"""What hangs on the core and may be deleted with its folder: one folder a feature.

`training/features.py` finds the folders and reads what each brings from its `feature.py`.
"""
