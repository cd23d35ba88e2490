"""Makes the episode viewer's folder from what a run recorded: `python -m features.viewer.command`.

Files of a run -> `records` (a line an episode) and `update_columns` (what the update was given) ->
`credit_path` (reward -> return -> baseline -> advantage) -> `list_columns`, `episode_pages` and
`search_index`, which `data_files` writes as scripts that a page opened from the disk may load.
`assets/` holds the pages themselves; they make elements by `features/shared/elements.js`.

Invariant: nothing here writes into a run's records, and a damaged record costs its own episode.
"""
