"""What the papers prove, in numbers: docs/theory.md says what was found."""
