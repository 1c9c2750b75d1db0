"""`make test-flower` installs Flower; without it there is nothing to run here."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["test_*.py"]
