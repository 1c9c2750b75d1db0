"""The command that runs a study: its file, its workers, its tuning."""
