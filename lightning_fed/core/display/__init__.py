"""What people are shown: lines that are said once, and forms for notebooks."""
