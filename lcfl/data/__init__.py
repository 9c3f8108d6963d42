"""Federated data: data sets, partitions that deal them out to clients, and each client's train, val and test samples.

``partition`` and ``protocols`` hold pure functions of labels. ``datasets`` and ``samples`` define where inputs come
from and how a batch is gathered. ``datamodule`` combines these parts. This module imports nothing that is slow to
import.
"""
