"""Least squares of a few weights, none of them negative, in plain Python. Called by ``cost``."""

from collections.abc import Iterable, Sequence
from operator import mul

Vector = Sequence[float]


def dot(a: Vector, b: Vector) -> float:
    """The sum of products."""
    return sum(map(mul, a, b))


def fit(
    rows: Iterable[tuple[Vector, float, float]], *, before: Vector, precision: Vector
) -> list[float]:
    """The weights ``w``, none of them negative, that minimize the sum of two things:

    - over ``rows`` of (x, y, importance): ``importance * (dot(w, x) - y) ** 2``,
    - over the weights: ``precision * (w - before) ** 2``.

    So a weight that the rows do not determine stays near ``before``.
    """
    # Normal equations: matrix * w = vector.
    size = len(before)
    matrix = [[0.0] * size for _ in range(size)]
    vector = [0.0] * size
    for x, y, importance in rows:
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
        vector[i] += precision[i] * before[i]
    weights = [0.0] * size
    free = list(range(size))
    # While any weight would be negative, the most negative one is set to 0, and the others are
    # solved for again.
    while free:
        solved = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
        lowest = min(range(len(free)), key=solved.__getitem__)
        if solved[lowest] >= 0.0:
            for i, weight in zip(free, solved, strict=True):
                weights[i] = weight
            break
        del free[lowest]
    return weights


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a positive definite system, by elimination. Changes its arguments."""
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
