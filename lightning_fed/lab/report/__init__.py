"""Tables and plots of finished runs, from their folders."""
