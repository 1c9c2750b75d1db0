"""What works on finished runs: studies, reports, the dashboard, an attack. Nothing but the command line loads it."""
