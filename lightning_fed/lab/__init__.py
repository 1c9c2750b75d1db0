"""Tools for finished runs: studies, reports, the dashboard, an attack. Only the command line loads them."""
