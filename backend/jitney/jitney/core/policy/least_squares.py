"""Least squares of a few weights, none of them negative, in plain Python. Called by ``cost``."""

from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

Vector = Sequence[float]
Matrix = list[list[float]]


class Point(NamedTuple):
    """A measurement: ``dot(weights, x)`` should be ``y``."""

    x: Vector
    y: float
    importance: float
    """What the squared error is multiplied by."""


def dot(a: Vector, b: Vector) -> float:
    """The sum of products."""
    return sum(map(mul, a, b))


def fit(points: Iterable[Point], *, prior: Vector, precision: Vector) -> list[float]:
    """Ridge regression. The weights ``w``, none of them negative, that minimize, nearly, the sum
    of two things:

    - over the points: ``importance * (dot(w, x) - y) ** 2``,
    - over the weights: ``precision * (w - prior) ** 2``.

    So a weight that the points do not determine stays near ``prior``. Only nearly, because a weight
    that was once negative on the way stays 0: see :func:`_solve_not_negative`.
    """
    # The normal equations: matrix * w = vector.
    size = len(prior)
    matrix = [[0.0] * size for _ in range(size)]
    vector = [0.0] * size
    for x, y, importance in points:
        for i, x_i in enumerate(x):
            if not x_i:
                continue
            scaled = importance * x_i
            vector[i] += scaled * y
            row = matrix[i]
            for j, x_j in enumerate(x):
                row[j] += scaled * x_j
    for i in range(size):
        matrix[i][i] += precision[i]
        vector[i] += precision[i] * prior[i]
    return _solve_not_negative(matrix, vector)


def _solve_not_negative(matrix: Matrix, vector: list[float]) -> list[float]:
    """Solve a system. While any weight would be negative, the most negative one is set to 0 for
    good, and the system is solved for the others."""
    weights = [0.0] * len(vector)
    unknown = list(range(len(vector)))
    while unknown:
        part = [[matrix[i][j] for j in unknown] for i in unknown]
        solved = _solve(part, [vector[i] for i in unknown])
        lowest = min(solved)
        if lowest >= 0.0:
            for i, weight in zip(unknown, solved, strict=True):
                weights[i] = weight
            break
        del unknown[solved.index(lowest)]
    return weights


def _solve(matrix: Matrix, vector: list[float]) -> list[float]:
    """Solve a positive definite system by Gaussian elimination. Changes its arguments."""
    size = len(vector)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            vector[k] -= factor * vector[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = dot(matrix[i][i + 1 :], solution[i + 1 :])
        solution[i] = (vector[i] - known) / matrix[i][i]
    return solution
