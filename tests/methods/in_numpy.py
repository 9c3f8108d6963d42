"""Clients of two kinds with a few points each: as a data module, and for computations in numpy with full batches."""

from itertools import combinations

import numpy as np

from tests.helpers.builders import dealt, linear_step, two_sided


class Clients:
    """Clients 0, 1, ... with these numbers of training samples. Unequal numbers make weights by samples visible."""

    def __init__(self, *sizes):
        self.sizes = np.array(sizes)
        self.inputs, self.targets, train, self.test = two_sided(len(sizes), max(sizes))
        self.train = [share[:size] for share, size in zip(train, sizes, strict=True)]

    def data(self, **options):
        return dealt(self.inputs, self.targets, self.train, test=self.test, **options)

    def loss(self, w, client, share=None):
        rows = (self.train if share is None else share)[client]
        return linear_step(w, self.inputs[rows], self.targets[rows])[0]

    def slope(self, w, client):
        return linear_step(w, self.inputs[self.train[client]], self.targets[self.train[client]])[1]

    def trained(self, w, client, steps, lr=0.5):
        for _ in range(steps):
            w = w - lr * self.slope(w, client)
        return w

    def mean(self, models, members):
        """Returns the mean of these clients' models, weighted by samples."""
        return np.average([models[i] for i in members], axis=0, weights=self.sizes[members])


def best_parts(points):
    """Returns labels 0 and 1 of the two parts of some points with the smallest sum of squares, by trying all."""
    everybody = set(range(len(points)))
    parts = [set(part) for size in range(1, len(points)) for part in combinations(everybody, size)]

    def scatter(part):
        rows = points[sorted(part)]
        return ((rows - rows.mean(axis=0)) ** 2).sum()

    best = min(parts, key=lambda part: scatter(part) + scatter(everybody - part))
    return np.array([int(i in best) for i in range(len(points))])
