"""The command ``lightning-fed privacy``: the noise for ε, or the ε of noise, before anything is trained."""

from math import ceil
from typing import Any

from lightning_fed.errors import expect, expect_count, expect_number
from lightning_fed.functional import privacy
from lightning_fed.lab.common import CommandParser

__all__ = ["main", "make_parser"]


def main(argv: list[str]) -> int:
    """Prints the noise and ε of a run, and the words that train it; returns 0."""
    options = make_parser().parse_args(argv)
    rounds, delta = expect_count("--rounds", options.rounds), expect_number("--delta", options.delta, above=0, below=1)
    plan = _of_clients if options.samples is None else _of_samples
    noise_for, epsilon_of, whose, words = plan(options, rounds, delta)
    if (noise := expect_number("--noise", options.noise, above=0, optional=True)) is None:
        noise = ceil(1e4 * noise_for(expect_number("--epsilon", options.epsilon, above=0))) / 1e4
    by = "RDP" if options.samples is None or noise < 0.3 else "PLD"
    print(f"noise {noise:g}: ε = {epsilon_of(noise):.4g} at δ = {delta:g} after {rounds} rounds {whose}, by {by}")
    option = words.split()[0]
    print(f"lightning-fed fit ... {words} {option}.noise {noise:g} {option}.delta {delta:g} {option}.clip C")
    return 0


def _of_clients(options: Any, rounds: int, delta: float) -> tuple[Any, Any, str, str]:
    """Returns the function from ε to z, that from z to ε, whose ε it is, and the words of a run."""
    clients, count = expect_count("--clients", options.clients), expect_count("--per_round", options.per_round)
    expect(count <= clients, f"Expected `--per_round` to be at most `--clients`, got {count} of {clients}.")
    method, share, sensitivity = ("LocalDP", 1.0, 2) if options.local else ("CentralDP", count / clients, 1)
    return (
        lambda epsilon: sensitivity * privacy.gaussian_noise(epsilon, share, rounds, delta),
        lambda noise: privacy.gaussian_epsilon(noise / sensitivity, share, rounds, delta),
        "of a client in all of them" if options.local else f"of {count} of {clients} clients on average",
        f"--trainer.callbacks {method}",
    )


def _of_samples(options: Any, rounds: int, delta: float) -> tuple[Any, Any, str, str]:
    expect(not options.local, "Expected `--local` or `--samples`, got both: give one of them.")
    samples, batch = expect_count("--samples", options.samples), expect_count("--batch_size", options.batch_size)
    steps = expect_count("--local_steps", options.local_steps, optional=True) or ceil(samples / batch)
    plan, cut = {(samples, rounds * steps)}, (batch, privacy.most_samples(batch), delta)
    return (
        lambda epsilon: privacy.samples_noise(plan, epsilon, *cut),
        lambda noise: privacy.samples_epsilon(plan, noise, *cut),
        f"of {steps} steps of a client of {samples} samples",
        f"--client DPSGD --data.batch_size {batch} --trainer.local_steps {steps}",
    )


def make_parser() -> CommandParser:
    """Makes the parser of this command."""
    parser = CommandParser(
        prog="lightning-fed privacy",
        description="Plans differential privacy without training: prints z for `--epsilon`, or ε for `--noise`.",
    )
    parser.add_argument("--clients", type=int, default=1, help="N, all clients (default: %(default)s)")
    parser.add_argument("--per_round", type=int, default=1, help="clients of a round on average (default: %(default)s)")
    parser.add_argument("--rounds", type=int, required=True, help="rounds; with `--local` those of one client")
    parser.add_argument("--delta", type=float, required=True, help="δ, below 1 / N, or 1 / n")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--epsilon", type=float, help="ε after all rounds")
    wanted.add_argument("--noise", type=float, help="z, the standard deviation of the noise in units of the clip")
    parser.add_argument("--local", action="store_true", help="noise of each client (LocalDP), not of the server")
    parser.add_argument("--samples", type=int, help="n, samples of a client: noise of its local steps (DPSGD)")
    parser.add_argument("--batch_size", type=int, default=10, help="B, with `--samples` (default: %(default)s)")
    parser.add_argument("--local_steps", type=int, help="steps of a round, with `--samples` (default: an epoch)")
    return parser
