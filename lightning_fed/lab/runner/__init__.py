"""The command that runs a study: reads its file, starts its workers, and tunes."""
