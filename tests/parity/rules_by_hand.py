"""Server rules and masks in NumPy, from their formulas: what the package is compared with, and nothing of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import product
from math import fsum, tanh

import numpy as np
import torch
from scipy.optimize import minimize

# η_g of every rule; not 1, so that what it multiplies is seen.
LR = 0.7
Array = np.ndarray


@dataclass(frozen=True)
class Round:
    """What n clients of N send in a round, one row for each.

    Attributes:
        sizes: s_i, shape (n,), integer.
        deltas: δ_i, shape (n, d).
        distances: a_i of FedNova, shape (n,).
        gradients: g_i of FedGMA and D_i of CGW, shape (n, d).
        losses: L_i, shape (n,).
        tensors: Elements of each parameter tensor; they sum to d.
        registered: N.
    """

    sizes: Array
    deltas: Array
    distances: Array
    gradients: Array
    losses: Array
    tensors: tuple[int, ...]
    registered: int = 9

    def mean(self, rows: Array, counts: Array) -> Array:
        """Σ p_i r_i with p_i in proportion to the counts: what cancels in whole numbers is 0 exactly."""
        return (counts[:, None] * rows).sum(axis=0) / counts.sum()


@dataclass
class Server:
    """What the server knows before a step: w, p_i before normalisation, a mask before the rule, and its memory."""

    w: Array
    counts: Array
    before: Callable[[Array], Array]
    memory: dict[str, Array] = field(default_factory=dict)

    def pseudo_gradient(self, each: Round) -> Array:
        """Δ, under the mask if that comes first."""
        return self.before(each.mean(each.deltas, self.counts))

    def recall(self, name: str, initial: float = 0.0) -> Array:
        return self.memory.get(name, np.full_like(self.w, initial))


Rule = Callable[[Round, Server], Array]
Mask = Callable[[Round], Array]


def train(
    rule: Rule, masks: list[Array], weighting: str, apply: str, w: Array, rounds: list[Round], keep: str = "all"
) -> list[Array]:
    """Returns w after each round: w + m ⊙ (what the rule adds), or the mask on the pseudo-gradient alone."""
    memory: dict[str, Array] = {}
    path = []
    for each, m in zip(rounds, masks, strict=True):
        over, nothing = partial(_over, m=m, keep=keep), np.copy
        before, after = (over, nothing) if apply == "before" else (nothing, over)
        counts = {"samples": each.sizes, "uniform": np.ones_like(each.sizes), "inverse": 1 / each.sizes}[weighting]
        w = w + after(rule(each, Server(w, counts, before, memory)))
        path.append(w)
    return path


def _over(step: Array, m: Array, keep: str) -> Array:
    """m ⊙ u, or u as far along itself or as long as that, or that in the length of u."""
    masked = m * step
    if keep == "all" or not step.any() or not masked.any():
        return masked
    if keep == "progress":
        return step * (sum(m * step * step) / sum(step * step))
    ratio = np.sqrt(sum(x * x for x in masked)) / np.sqrt(sum(x * x for x in step))
    return step * ratio if keep == "length" else masked / ratio


def shuffled(m: Array, tensors: tuple[int, ...], seed: int, number: int) -> Array:
    """The values of each tensor in another order, that of the seed (14 is what the stream is for) and the round."""
    draw = np.random.default_rng(np.random.SeedSequence([seed, 14, number, 0]))
    return np.concatenate([part[draw.permutation(len(part))] for part in np.split(m, np.cumsum(tensors)[:-1])])


# Rules: each returns all that is added to w, η_g included.


def fedavg(each: Round, server: Server) -> Array:
    return LR * server.pseudo_gradient(each)


def fedavgm(each: Round, server: Server, beta: float = 0.9) -> Array:
    m = server.memory["m"] = beta * server.recall("m") + server.pseudo_gradient(each)
    return LR * m


def fedadagrad(each: Round, server: Server, epsilon: float = 1e-3, v_from: float = 1e-6) -> Array:
    mean = server.pseudo_gradient(each)
    v = server.memory["v"] = server.recall("v", v_from) + mean**2
    return LR * mean / (np.sqrt(v) + epsilon)


def fedadam(each: Round, server: Server, epsilon: float = 1e-3, v_from: float = 1e-6, yogi: bool = False) -> Array:
    beta1, beta2, mean = 0.9, 0.99, server.pseudo_gradient(each)
    z = server.memory["z"] = beta1 * server.recall("z") + (1 - beta1) * mean
    v = server.recall("v", v_from)
    v = v - (1 - beta2) * mean**2 * np.sign(v - mean**2) if yogi else beta2 * v + (1 - beta2) * mean**2
    server.memory["v"] = v
    return LR * z / (np.sqrt(v) + epsilon)


def fednova(each: Round, server: Server) -> Array:
    distances = each.distances[:, None]
    mean_distance = each.mean(distances, server.counts)
    return LR * mean_distance * server.before(each.mean(each.deltas / distances, server.counts))


def feddyn(each: Round, server: Server, alpha: float) -> Array:
    mean = server.pseudo_gradient(each)
    h = server.memory["h"] = server.recall("h") - alpha / each.registered * len(each.deltas) * mean
    return LR * (mean - h / alpha)


def fedgma(each: Round, server: Server, p: str = "0.8", server_lr: float = 0.1, prose: bool = False) -> Array:
    up, down = (each.gradients > 0).sum(axis=0), (each.gradients < 0).sum(axis=0)
    agreeing = np.maximum(up, down) if prose else abs(up - down)
    mask = np.array([int(count) >= Fraction(p) * len(each.gradients) for count in agreeing], dtype=float)
    # The mean of M ⊙ g_i; η_g is for Δ alone.
    return LR * server.pseudo_gradient(each) - server_lr * each.mean(mask * each.gradients, server.counts)


def cgw(each: Round, server: Server, alpha: float, shared: bool = False) -> Array:
    lengths = np.sqrt((each.gradients**2).sum(axis=1))
    enters = (lengths > 0) & np.isfinite(lengths) & np.isfinite(each.losses)
    correction = np.zeros_like(server.w)
    if enters.any():
        rows, lengths, losses = each.gradients[enters], lengths[enters], each.losses[enters]
        total = rows.sum(axis=0)
        c = min(alpha * loss / length for loss, length in zip(losses, lengths, strict=True))
        along = np.array([(row * total).sum() for row in rows]) / lengths
        x = c * along / lengths / np.sqrt((along**2).sum())
        if shared:
            x = np.full(len(rows), c / np.sqrt((total**2).sum()))
        correction = (x[:, None] * rows).sum(axis=0)
    return LR * server.pseudo_gradient(each) - correction


def adam(each: Round, server: Server, lr: float, eps: float, decay: float = 0.0) -> Array:
    """Adam as torch has it: both moments corrected for their start at 0, ε after the correction, L2 decay."""
    beta1, beta2 = 0.9, 0.999
    gradient = decay * server.w - server.pseudo_gradient(each)
    t = server.memory["t"] = server.recall("t") + 1
    m = server.memory["m"] = beta1 * server.recall("m") + (1 - beta1) * gradient
    v = server.memory["v"] = beta2 * server.recall("v") + (1 - beta2) * gradient**2
    return -LR * lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)


def median(each: Round, server: Server) -> Array:
    ordered, n = np.sort(each.deltas, axis=0), len(each.deltas)
    return LR * (ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2)


def trimmed_mean(each: Round, server: Server, trim: int) -> Array:
    kept = [sorted(column)[trim : len(column) - trim] for column in each.deltas.T]
    return LR * np.array([sum(column) / len(column) for column in kept])


def krum(each: Round, server: Server, corrupted: int, selected: int) -> Array:
    """The selected clients of the lowest (score, update); ``selected`` below 1 counts from n."""
    scores, n = [], len(each.deltas)
    for i, own in enumerate(each.deltas):
        others = sorted(((own - other) ** 2).sum() for j, other in enumerate(each.deltas) if j != i)
        scores.append(sum(others[: n - corrupted - 2]))
    best = sorted(range(n), key=lambda i: (scores[i], *each.deltas[i]))[: selected if selected > 0 else n + selected]
    return LR * sum(each.deltas[i] for i in best) / len(best)


def bulyan(each: Round, server: Server, corrupted: int) -> Array:
    """Krum again and again, of those that are left, then the mean of the values nearest to the median."""
    left, picked = list(range(len(each.deltas))), []
    while len(picked) < len(each.deltas) - 2 * corrupted:
        scores = []
        for i in left:
            others = sorted(((each.deltas[i] - each.deltas[j]) ** 2).sum() for j in left if j != i)
            scores.append((sum(others[: max(len(left) - corrupted - 2, 0)]), *each.deltas[i], i))
        picked.append(min(scores)[-1])
        left.remove(picked[-1])
    step = []
    for column in each.deltas[picked].T:
        nearest = sorted(column, key=lambda x, column=column: (abs(x - np.median(column)), x))
        step.append(np.mean(nearest[: len(picked) - 2 * corrupted]))
    return LR * np.array(step)


def fedexp(each: Round, server: Server, epsilon: float) -> Array:
    """η_g of the authors' weighted form, which for equal counts is the paper's."""
    mean, squares = server.pseudo_gradient(each), (each.deltas**2).sum(axis=1)
    mean_square, square = (server.counts * squares).sum() / server.counts.sum(), (mean**2).sum()
    return LR * max(1.0, mean_square / (2 * (square + epsilon)) if square + epsilon else 1.0) * mean


def sign_majority(each: Round, server: Server) -> Array:
    votes = [(column > 0).sum() - (column < 0).sum() for column in each.deltas.T]
    return LR * np.array([float(vote > 0) - float(vote < 0) for vote in votes])


def ties(each: Round, server: Server, keep: float) -> Array:
    rows, count = [], max(1, round(keep * each.deltas.shape[1]))
    for row in each.deltas:
        least = sorted(abs(row))[-count]
        rows.append([x if abs(x) >= least else 0.0 for x in row])
    step = []
    for column in zip(*rows, strict=True):
        total = fsum(column)
        agreeing = [x for x in column if x * total > 0]
        step.append(fsum(agreeing) / len(agreeing) if agreeing else 0.0)
    return LR * np.array(step)


def pcgrad(each: Round, server: Server, seed: int) -> Array:
    """Vector by vector; the orders are those of the seed (15 is what the stream is for) and the round."""
    number, n = server.recall("round")[0] + 1, len(each.deltas)
    server.memory["round"] = np.array([number])
    draw = np.random.default_rng(np.random.SeedSequence([seed, 15, int(number), 0]))
    others = np.array([[j for j in range(n) if j != i] for i in range(n)], dtype=np.int64).reshape(n, n - 1)
    projected = []
    for own, order in zip(each.deltas, draw.permuted(others, axis=1), strict=True):
        for other in each.deltas[order]:
            if own @ other < 0:
                own = own - (own @ other) / (other @ other) * other
        projected.append(own)
    return LR * each.mean(np.array(projected), server.counts)


def fedfv(each: Round, server: Server, alpha: float, tau: int) -> Array:
    """Vector by vector; here all clients are in every round, so that nobody's former update counts."""
    losses, n = losses_of(each), len(each.deltas)
    order = sorted(range(n), key=lambda i: (losses[i], *each.deltas[i]))
    projected = []
    for i, own in enumerate(each.deltas):
        for j in order if i not in order[n - max(round(alpha * n), alpha > 0) :] else []:
            other = each.deltas[j]
            if j != i and own @ other < 0:
                own = own - (own @ other) / (other @ other) * other
        projected.append(own)
    step, mean = each.mean(np.array(projected), server.counts), each.mean(each.deltas, server.counts)
    length = np.sqrt((step**2).sum())
    return LR * step * (np.sqrt((mean**2).sum()) / length if length else 0.0)


def fedmgda(each: Round, server: Server, epsilon: float) -> Array:
    """The shortest of the points that each choice of clients at their bounds, and the rest free, leads to."""
    lengths = np.sqrt((each.deltas**2).sum(axis=1))
    moved = lengths > 0
    if not moved.any():
        return np.zeros_like(server.w)
    rows, first = each.deltas[moved] / lengths[moved, None], server.counts[moved] / server.counts[moved].sum()
    low, high, best = np.maximum(first - epsilon, 0), np.minimum(first + epsilon, 1), first
    for where in product((low, high, None), repeat=len(rows)):
        free = np.array([bound is None for bound in where])
        weights = np.array([0.0 if b is None else b[i] for i, b in enumerate(where)])
        if free.any():
            fixed, base = weights @ rows, np.flatnonzero(free)[0]
            weights[base] = 1 - weights.sum()
            along = rows[free][1:] - rows[base]
            if len(along):
                start = fixed + weights[base] * rows[base]
                moves = np.linalg.lstsq(along.T, -start, rcond=None)[0]
                weights[np.flatnonzero(free)[1:]] = moves
                weights[base] -= moves.sum()
        inside = abs(weights.sum() - 1) < 1e-9 and (weights > low - 1e-9).all() and (weights < high + 1e-9).all()
        if inside and ((weights @ rows) ** 2).sum() < ((best @ rows) ** 2).sum():
            best = weights
    return LR * (best @ rows)


def fedomg(each: Round, server: Server, kappa: float) -> Array:
    """Sequential quadratic programming on γ from each client and from all, the best of them."""
    mean = each.mean(each.deltas, server.counts)
    length, n = np.sqrt((mean**2).sum()), len(each.deltas)
    if length == 0:
        return np.zeros_like(mean)

    def goal(gamma: Array) -> float:
        return (gamma @ each.deltas @ mean) / length**2 + kappa * np.sqrt(((gamma @ each.deltas) ** 2).sum()) / length

    sums = {"type": "eq", "fun": lambda gamma: gamma.sum() - 1}
    found = [
        minimize(goal, start, method="SLSQP", bounds=[(0, 1)] * n, constraints=sums, options={"ftol": 1e-15}).x
        for start in [*(0.9 * np.eye(n) + 0.1 / n), np.full(n, 1 / n)]
    ]
    best = min(found, key=goal) @ each.deltas
    norm = np.sqrt((best**2).sum())
    return LR * (mean + kappa * length * best / norm if norm > 1e-6 * length else mean)


def fedlws(each: Round, server: Server, beta: float, least: float, most: float) -> Array:
    """Tensor by tensor; the server's rate multiplies the way from w to the model that has shrunk."""
    new, start, center = server.w + server.pseudo_gradient(each), 0, each.deltas.sum(axis=0) / len(each.deltas)
    for size in each.tensors:
        at = slice(start, start := start + size)
        spread = fsum(np.sqrt(((row - center)[at] ** 2).sum()) for row in each.deltas) / len(each.deltas)
        tau, length = min(max(beta * spread, least), most), np.sqrt((server.w[at] ** 2).sum())
        way = tau * np.sqrt(((new - server.w)[at] ** 2).sum())
        new[at] *= length / (length + way) if length else 1.0
    return LR * (new - server.w)


def fedgala(each: Round, server: Server, iterations: int, mix: float) -> Array:
    """Vector by vector, tensor by tensor."""
    step, start, n = np.zeros_like(server.w), 0, len(each.deltas)
    shares = server.counts / server.counts.sum()
    for size in each.tensors:
        at = slice(start, start := start + size)
        rows, weights = shares[:, None] * each.deltas[:, at], np.full(n, 1 / n)
        for _ in range(iterations):
            way = weights @ rows
            length = np.sqrt((way**2).sum())
            length *= length > 1e-12 * np.sqrt((rows**2).sum(axis=1)).sum()
            below = [np.sqrt((row**2).sum()) * length for row in rows]
            cosines = [row @ way / scale if scale else 0.0 for row, scale in zip(rows, below, strict=True)]
            weights = np.array([(1 + cosine) / (n + fsum(cosines)) for cosine in cosines])
        step[at] = (mix / n + (1 - mix) * weights) @ each.deltas[:, at]
    return LR * step


def fedawa(each: Round, server: Server, steps: int, rate: float) -> Array:
    """The objective as it is written, its slope by automatic differentiation and the steps by torch's Adam."""
    b = torch.tensor(server.memory.get("b", np.zeros(len(each.deltas))), requires_grad=True)
    shares, rows, w = (torch.tensor(x, dtype=torch.float64) for x in (server.counts, each.deltas, server.w))
    optimizer = torch.optim.Adam([b], lr=rate, betas=(0.5, 0.999))
    for _ in range(steps):
        weights = torch.softmax(torch.log(shares) + b, dim=0)
        spread = torch.linalg.vector_norm(rows - weights @ rows, dim=1)
        apart = 1 - torch.nn.functional.cosine_similarity(w + rows, w[None], dim=1)
        optimizer.zero_grad()
        (weights @ (spread + apart)).backward()
        optimizer.step()
    server.memory["b"] = b.detach().numpy()
    return LR * (torch.softmax(torch.log(shares) + b, dim=0) @ rows).detach().numpy()


def losses_of(each: Round) -> Array:
    """f_i of a round in which nobody has diverged."""
    return np.where(np.isfinite(each.losses), each.losses, 1.7)


def qfedavg(each: Round, server: Server, q: float, lipschitz: float) -> Array:
    losses, shares = losses_of(each), server.counts / server.counts.sum()
    squares = (each.deltas**2).sum(axis=1)
    above = ((shares * losses**q)[:, None] * lipschitz * each.deltas).sum(axis=0)
    below = (shares * (q * losses ** (q - 1) * lipschitz**2 * squares + lipschitz * losses**q)).sum()
    return LR * above / below


def term(each: Round, server: Server, t: float) -> Array:
    return LR * each.mean(each.deltas, server.counts * np.exp(t * losses_of(each)))


def afl(each: Round, server: Server, gamma: float) -> Array:
    """The projection by bisection on what is taken off every coordinate."""
    mixture = server.memory.get("mixture", server.counts / server.counts.sum())
    point, low, high = mixture + gamma * losses_of(each), -10.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    server.memory["mixture"] = np.maximum(point - low, 0)
    return LR * server.before(each.mean(each.deltas, mixture))


def losses_after(each: Round) -> Array:
    """f_i at the model after the round."""
    return losses_of(each)[::-1] + np.linspace(0.0, 0.5, len(each.losses))


def feddg_ga(each: Round, server: Server, d: float) -> Array:
    """The weight of a client grows with what the step costs it, by less in each of three rounds."""
    a = server.memory.get("a", server.counts / server.counts.sum())
    number = int(server.memory.get("round", np.array(0)))
    gaps = losses_after(each) - losses_of(each)
    away = [gap - fsum(gaps) / len(gaps) for gap in gaps]
    widest = max(map(abs, away))
    moved = [
        max(0.0, x + d * (1 - number / 3) * (gap / widest if widest else 0)) for x, gap in zip(a, away, strict=True)
    ]
    server.memory.update(a=np.array(moved) / fsum(moved), round=np.array(number + 1))
    return LR * server.before(each.mean(each.deltas, a))


def geometric_median(each: Round, server: Server, smoothing: float) -> Array:
    """Weiszfeld's iteration until nothing moves, from another start than the mean."""
    rows, center = each.deltas, each.deltas.min(axis=0) - 1.0
    for _ in range(100_000):
        lengths = np.maximum(np.sqrt(((rows - center) ** 2).sum(axis=1)), smoothing)
        pulls = server.counts / lengths
        former, center = center, (pulls[:, None] * rows).sum(axis=0) / pulls.sum()
        if abs(center - former).max() < 1e-14:
            break
    return LR * center


# Masks. Thresholds are decimal text, compared as exact fractions.


def sign_agreement(threshold: str, binary: bool = False, above: bool = False, by_samples: bool = False) -> Mask:
    def mask(each: Round) -> Array:
        voices = each.sizes if by_samples else np.ones_like(each.sizes)
        votes = [abs(sum(int(s) * int(np.sign(x)) for s, x in zip(voices, c, strict=True))) for c in each.deltas.T]
        return _hold(votes, [int(voices.sum())] * len(votes), threshold, binary, above)

    return mask


def magnitude_agreement(threshold: str, binary: bool = False) -> Mask:
    def mask(each: Round) -> Array:
        columns = [[Fraction(x) for x in column] for column in each.deltas.tolist()]
        columns = list(zip(*columns, strict=True))
        return _hold([abs(sum(c)) for c in columns], [sum(map(abs, c)) for c in columns], threshold, binary, False)

    return mask


def _hold(parts: list, wholes: list, threshold: str, binary: bool, above: bool) -> Array:
    """1 where A = part / whole reaches the threshold, else A or 0; 0/0 is 0."""
    found = []
    for part, whole in zip(parts, wholes, strict=True):
        agreement = Fraction(part) / whole if whole else Fraction(0)
        reached = agreement > Fraction(threshold) if above else agreement >= Fraction(threshold)
        found.append(1.0 if reached else 0.0 if binary else float(agreement))
    return np.array(found)


def sand(threshold: str, k: float) -> Mask:
    def mask(each: Round) -> Array:
        n, raw = len(each.deltas), []
        for column in each.deltas.T:
            gap = Fraction(abs(int(np.sign(column).sum())), n) - Fraction(threshold)
            variance = sum((x - sum(column) / n) ** 2 for x in column) / (n - 1) if n > 1 else 0.0
            limit = 1.0 if gap > 0 else 0.0
            raw.append(max(0.0, tanh(k * float(gap) / variance)) if variance else limit)
        parts = np.split(np.array(raw), np.cumsum(each.tensors)[:-1])
        return np.concatenate([part / (1e-10 + part.mean()) for part in parts])

    return mask
