"""The command ``lightning-fed privacy``: the noise for ε, or the ε of noise, before anything is trained."""

from math import ceil

from lightning_fed.errors import expect, expect_count, expect_number
from lightning_fed.functional.privacy import gaussian_epsilon, gaussian_noise
from lightning_fed.lab.common import CommandParser

__all__ = ["main", "make_parser"]


def main(argv: list[str]) -> int:
    """Prints the noise and ε of a run, and the words that train it; returns 0."""
    options = make_parser().parse_args(argv)
    clients, count = expect_count("--clients", options.clients), expect_count("--per_round", options.per_round)
    expect(count <= clients, f"Expected `--per_round` to be at most `--clients`, got {count} of {clients}.")
    rounds, delta = expect_count("--rounds", options.rounds), expect_number("--delta", options.delta, above=0, below=1)
    method, share, sensitivity = ("LocalDP", 1.0, 2) if options.local else ("CentralDP", count / clients, 1)
    if (noise := expect_number("--noise", options.noise, above=0, optional=True)) is None:
        epsilon = expect_number("--epsilon", options.epsilon, above=0)
        noise = ceil(1e4 * sensitivity * gaussian_noise(epsilon, share, rounds, delta)) / 1e4
    found = gaussian_epsilon(noise / sensitivity, share, rounds, delta)
    whose = "of a client in all of them" if options.local else f"of {count} of {clients} clients on average"
    print(f"noise {noise:g}: ε = {found:.4g} at δ = {delta:g} after {rounds} rounds {whose}, by RDP")
    words = f"--trainer.callbacks {method} --trainer.callbacks.noise {noise:g} --trainer.callbacks.delta {delta:g}"
    print(f"lightning-fed fit ... {words} --trainer.callbacks.clip C")
    return 0


def make_parser() -> CommandParser:
    """Makes the parser of this command."""
    parser = CommandParser(
        prog="lightning-fed privacy",
        description="Plans differential privacy without training: prints z for `--epsilon`, or ε for `--noise`.",
    )
    parser.add_argument("--clients", type=int, default=1, help="N, all clients (default: %(default)s)")
    parser.add_argument("--per_round", type=int, default=1, help="clients of a round on average (default: %(default)s)")
    parser.add_argument("--rounds", type=int, required=True, help="rounds; with `--local` those of one client")
    parser.add_argument("--delta", type=float, required=True, help="δ, below 1 / N")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--epsilon", type=float, help="ε after all rounds")
    wanted.add_argument("--noise", type=float, help="z, the standard deviation of the noise in units of the clip")
    parser.add_argument("--local", action="store_true", help="noise of each client (LocalDP), not of the server")
    return parser
