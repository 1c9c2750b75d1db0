"""The `lightning-fed` command, runnable from a checkout."""

from lightning_fed.cli import main

if __name__ == "__main__":
    main()
